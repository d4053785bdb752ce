// Mixers with a recurrent state within a step: see Mixer in plan.h. Ranks have heads, or channels, of their own: their results
// are gathered before the last projection, as those of attention.
#pragma once
#include <string.h>

#include <algorithm>
#include <cmath>

#include "step_streams.h"

namespace quire {

// log(1 + e^x), which is x above 20.
static inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

struct StepMixer : StepStreams {
    float* mix_in(const Mixer& m, i64 row, size_t part) const {
        return plan.mix_in_ + row * row_stride(plan.mix_in_size_) + m.offsets[part];
    }
    float* mix_conv(i64 row) const { return plan.mix_conv_ + row * row_stride(plan.mix_conv_size_); }
    float* mix_low(i64 row) const { return plan.mix_low_ + row * row_stride(plan.mix_low_size_); }
    float* mix_shared(i64 row) const { return plan.mix_shared_ + row * row_stride(plan.mix_shared_size_); }

    // The mixer of a layer, whose input is packed; its result joins the residual. num_rows is 0 afterwards if no row is wanted.
    void mix(const PlanLayer& l, bool is_last) {
        const Mixer& m = *l.mixer;
        if (worker.rank == 0) place_saves(m);
        project_in(l, m);
        if (m.kind == MixerKind::short_conv)
            each(num_rows, [&](i64 row) { multiply(mix_in(m, row, 0), mix_in(m, row, 2), m.values()); });
        convolve(m);
        switch (m.kind) {
            case MixerKind::delta: prepare_delta(m); break;
            case MixerKind::mamba2: prepare_mamba2(m); break;
            case MixerKind::mamba1: prepare_mamba1(l, m); break;
            case MixerKind::short_conv: break;
        }
        if (m.kind != MixerKind::short_conv) recur(m);
        if (is_last && !in.keeps_all && in.num_wanted_rows == 0) {
            num_rows = 0;
            return;
        }
        each(num_rows, [&](i64 row) { finish_row(m, row); });
        share(m, 0);
        if (m.has_group_norm() && !m.is_gate_first) share(m, m.total_values);
        rank_barrier();
        const bool is_normed = m.has_group_norm();
        if (is_normed) each(num_rows, [&](i64 row) { norm_groups(m, row); });
        const i64 stride = row_stride(plan.mix_shared_size_);
        const LoraModules read = {l.index, {LoraModule::mix_out}};
        pack_all(m.out_site, is_normed ? plan.mix_normed_ : plan.mix_shared_, stride, read);
        const LoraSums sums(lora, read);
        run_to_residual(l, *m.out, packed(m.out_site, 0, num_rows), waiting_mixer(l), sums[0], l.mixer_scale());
    }

private:
    static void multiply(float* y, const float* x, i64 n) {
        for (i64 i = 0; i < n; ++i) y[i] *= x[i];
    }

    // This rank's values of a half of the shared rows are written.
    void share(const Mixer& m, i32 first) {
        wrote(mix_shared(0) + first + m.first_value, num_rows, row_stride(plan.mix_shared_size_), m.values());
    }

    void place_saves(const Mixer& m) {
        const i32 count = in.save_starts[in.batch.num_sequences];
        plan.state_saves_.resize(count);
        plan.conv_saves_.resize(count);
        for (i32 i = 0; i < count; ++i) {
            const i64 tokens = in.saves[2 * i], row = in.saves[2 * i + 1];
            plan.state_saves_[i] = {tokens, m.states + row * m.state_size()};
            plan.conv_saves_[i] = {tokens, m.conv_states + row * m.conv_bytes()};
        }
    }

    void project_in(const PlanLayer& l, const Mixer& m) {
        constexpr size_t MAX_PARTS = 6;
        const LoraSums sums(lora, mixer_modules(l));
        Packed inputs[MAX_PARTS];
        LinearJob jobs[MAX_PARTS];
        for (size_t part = 0; part < m.in.size(); ++part) {
            inputs[part] = packed(l.mixer_site(), m.in_forms[part], num_rows);
            jobs[part] = adapted(job(*m.in[part], inputs[part], Finish::store, mix_in(m, 0, part), row_stride(plan.mix_in_size_)),
                sums[static_cast<i32>(part)]);
        }
        run(jobs, static_cast<i32>(m.in.size()));
        if (!m.part_scales.empty()) {
            each(num_rows, [&](i64 row) {
                for (size_t part = 0; part < m.in.size(); ++part)
                    kernels.elementwise->scale_and_cap(mix_in(m, row, part), m.in[part]->weight.n, m.part_scales[part], 0.0f);
            });
        }
        if (m.low_z) project_low(m, m.low_z_site, *m.low_z, {l.index, {LoraModule::mix_low_z}}, 3, 0);
        if (m.low_a) project_low(m, m.low_a_site, *m.low_a, {l.index, {LoraModule::mix_low_a}}, 5, m.values());
    }

    // The second projection of a part of the inputs, into the low rows from `first` on.
    void project_low(
        const Mixer& m, const Site& site, const NativeWeight& weight, const LoraModules& read, size_t part, i32 first) {
        pack_all(site, mix_in(m, 0, part), row_stride(plan.mix_in_size_), read);
        const LoraSums sums(lora, read);
        const Packed input = packed(site, 0, num_rows);
        const LinearJob one =
            adapted(job(weight, input, Finish::store, plan.mix_low_ + first, row_stride(plan.mix_low_size_)), sums[0]);
        run(&one, 1);
    }

    void convolve(const Mixer& m) {
        const i32 channels = m.channels();
        ConvJob conv;
        conv.channels = channels;
        conv.taps = m.taps;
        conv.is_bf16 = m.is_bf16;
        conv.x = plan.mix_in_;
        conv.weight = m.conv_weight.data();
        conv.bias = m.conv_bias.empty() ? nullptr : m.conv_bias.data();
        conv.out = plan.mix_conv_;
        conv.stride = row_stride(plan.mix_in_size_);
        conv.out_stride = row_stride(plan.mix_conv_size_);
        const i64 blocks = ceil_div(channels, CONV_CHANNELS);
        each(in.batch.num_sequences * blocks, [&](i64 item) {
            const i64 s = item / blocks;
            const i32 first = static_cast<i32>(item % blocks) * CONV_CHANNELS, begin = in.batch.query_starts[s],
                      source = in.state_sources[s], saved = in.save_starts[s];
            const u8* const from = source < 0 ? nullptr : m.conv_states + source * m.conv_bytes();
            const ConvRun one = {begin, in.batch.query_starts[s + 1] - begin, from, plan.conv_saves_.data() + saved,
                in.save_starts[s + 1] - saved};
            kernels.recurrence->convolve(conv, one, first, std::min(CONV_CHANNELS, channels - first));
        });
    }

    void recur(const Mixer& m) {
        const Decay kind = m.kind == MixerKind::mamba1 ? Decay::channel : m.low_a ? Decay::row : Decay::head;
        const bool is_delta = m.kind == MixerKind::delta;
        const RecurrenceJob recurrence = {m.k_heads, m.v_heads, m.k_dim, m.v_dim, kind, plan.mix_q_, plan.mix_k_, plan.mix_v_,
            plan.mix_decay_, kind == Decay::channel ? m.rates.data() : nullptr, is_delta ? plan.mix_beta_ : nullptr,
            plan.mix_out_};
        const i64 tiles = ceil_div(m.v_dim, STATE_COLUMNS);
        each(in.batch.num_sequences * m.v_heads * tiles, [&](i64 item) {
            const i32 first = static_cast<i32>(item % tiles) * STATE_COLUMNS, head = static_cast<i32>(item / tiles % m.v_heads);
            const i64 s = item / tiles / m.v_heads;
            const i32 begin = in.batch.query_starts[s], source = in.state_sources[s], saved = in.save_starts[s];
            const float* const from = source < 0 ? nullptr : m.states + source * m.state_size();
            const RecurrenceRun one = {begin, in.batch.query_starts[s + 1] - begin, from, plan.state_saves_.data() + saved,
                in.save_starts[s + 1] - saved};
            kernels.recurrence->run(recurrence, one, head, first, std::min(STATE_COLUMNS, m.v_dim - first));
        });
    }

    void prepare_delta(const Mixer& m) {
        const i32 keys = m.k_heads * m.k_dim, values = m.values(), decays = m.num_decays();
        each(num_rows, [&](i64 row) {
            float* const convolved = mix_conv(row);
            kernels.elementwise->activate(Activation::silu, convolved, nullptr, m.channels());
            float *const q = plan.mix_q_ + row * keys, *const k = plan.mix_k_ + row * keys;
            memcpy(q, convolved, sizeof(float) * keys);
            memcpy(k, convolved + keys, sizeof(float) * keys);
            memcpy(plan.mix_v_ + row * values, convolved + 2 * keys, sizeof(float) * values);
            kernels.elementwise->turn_heads(&m.q_norm.job, q, m.k_heads, m.k_dim, nullptr, nullptr, 0);
            kernels.elementwise->turn_heads(&m.k_norm.job, k, m.k_heads, m.k_dim, nullptr, nullptr, 0);
            const float* const b = mix_in(m, row, 4);
            for (i32 head = 0; head < m.v_heads; ++head)
                plan.mix_beta_[row * m.v_heads + head] = m.write_scale / (1.0f + std::exp(-b[head]));
            const float* const a = m.low_a ? mix_low(row) + values : mix_in(m, row, 5);
            const i32 per_head = decays / m.v_heads;
            for (i32 i = 0; i < decays; ++i)
                plan.mix_decay_[row * decays + i] = std::exp(m.rates[i / per_head] * softplus(a[i] + m.step[i]));
        });
    }

    void prepare_mamba2(const Mixer& m) {
        const i32 keys = m.k_heads * m.k_dim, values = m.values();
        each(num_rows, [&](i64 row) {
            float* const convolved = mix_conv(row);
            kernels.elementwise->activate(Activation::silu, convolved, nullptr, m.channels());
            memcpy(plan.mix_k_ + row * keys, convolved + values, sizeof(float) * keys);
            memcpy(plan.mix_q_ + row * keys, convolved + values + keys, sizeof(float) * keys);
            const float* const steps = mix_in(m, row, 4);
            for (i32 head = 0; head < m.v_heads; ++head) {
                const float step = std::min(std::max(softplus(steps[head] + m.step[head]), m.min_step), m.max_step);
                plan.mix_decay_[row * m.v_heads + head] = std::exp(m.rates[head] * step);
                const i64 at = static_cast<i64>(head) * m.v_dim;
                for (i32 i = 0; i < m.v_dim; ++i) plan.mix_v_[row * values + at + i] = convolved[at + i] * step;
            }
        });
    }

    // B, C and the steps are made of all channels.
    void prepare_mamba1(const PlanLayer& l, const Mixer& m) {
        const LoraModules reads = {l.index, {LoraModule::mix_read}}, steps_of = {l.index, {LoraModule::mix_step}};
        const LoraSums read_sums(lora, reads), step_sums(lora, steps_of);
        const i32 values = m.values(), rank = m.step_up->weight.k;
        const i64 stride = row_stride(plan.mix_shared_size_), low_stride = row_stride(plan.mix_low_size_);
        each(num_rows, [&](i64 row) {
            kernels.elementwise->activate(Activation::silu, mix_conv(row), nullptr, values);
            memcpy(mix_shared(row) + m.total_values + m.first_value, mix_conv(row), sizeof(float) * values);
        });
        share(m, m.total_values);
        rank_barrier();
        pack_all(m.read_site, plan.mix_shared_ + m.total_values, stride, reads);
        const Packed input = packed(m.read_site, 0, num_rows);
        const LinearJob read = adapted(job(*m.read, input, Finish::store, plan.mix_low_, low_stride), read_sums[0]);
        run(&read, 1);
        each(num_rows, [&](i64 row) {
            float *const steps = mix_low(row), *const b = steps + rank, *const c = b + m.k_dim;
            if (m.step_norm.is_present) {
                kernels.elementwise->norm(m.step_norm.job, steps, steps);
                kernels.elementwise->norm(m.b_norm.job, b, b);
                kernels.elementwise->norm(m.c_norm.job, c, c);
            }
            memcpy(plan.mix_k_ + row * m.k_dim, b, sizeof(float) * m.k_dim);
            memcpy(plan.mix_q_ + row * m.k_dim, c, sizeof(float) * m.k_dim);
        });
        pack_all(m.step_site, plan.mix_low_, low_stride, steps_of);
        const Packed steps = packed(m.step_site, 0, num_rows);
        const LinearJob up = adapted(job(*m.step_up, steps, Finish::store, plan.mix_decay_, values), step_sums[0]);
        run(&up, 1);
        each(num_rows, [&](i64 row) {
            float *const decay = plan.mix_decay_ + row * values, *const v = plan.mix_v_ + row * values;
            for (i32 i = 0; i < values; ++i) {
                decay[i] = softplus(decay[i]);
                v[i] = decay[i] * mix_conv(row)[i];
            }
        });
    }

    // A row's outputs of this rank, gated and, where a norm is of one head, normed.
    void finish_row(const Mixer& m, i64 row) const {
        const i32 values = m.values();
        float *const to = mix_shared(row) + m.first_value, *const y = plan.mix_out_ + row * values,
                     *const convolved = mix_conv(row);
        switch (m.kind) {
            case MixerKind::short_conv:
                memcpy(to, mix_in(m, row, 1), sizeof(float) * values);
                return multiply(to, convolved, values);
            case MixerKind::delta:
                kernels.elementwise->turn_heads(&m.norm.job, y, m.v_heads, m.v_dim, nullptr, nullptr, 0);
                if (m.low_z) {
                    memcpy(to, y, sizeof(float) * values);
                    return kernels.elementwise->gate(to, mix_low(row), values);
                }
                memcpy(to, mix_in(m, row, 3), sizeof(float) * values);
                return kernels.elementwise->activate(Activation::silu, to, y, values);
            case MixerKind::mamba2:
                for (i32 head = 0; head < m.v_heads; ++head)
                    kernels.elementwise->add_scaled(y + static_cast<i64>(head) * m.v_dim,
                        convolved + static_cast<i64>(head) * m.v_dim, m.skip[head], m.v_dim);
                if (m.has_group_norm() && !m.is_gate_first) {
                    memcpy(to, y, sizeof(float) * values);
                    memcpy(to + m.total_values, mix_in(m, row, 3), sizeof(float) * values);
                    return kernels.elementwise->activate(Activation::silu, to + m.total_values, nullptr, values);
                }
                memcpy(to, mix_in(m, row, 3), sizeof(float) * values);
                return kernels.elementwise->activate(Activation::silu, to, y, values);
            case MixerKind::mamba1:
                for (i32 i = 0; i < values; ++i) y[i] += m.skip[i] * convolved[i];
                memcpy(to, mix_in(m, row, 1), sizeof(float) * values);
                return kernels.elementwise->activate(Activation::silu, to, y, values);
        }
    }

    // The norm of groups of the outputs of all ranks, and the gate after it.
    void norm_groups(const Mixer& m, i64 row) const {
        const float* const from = mix_shared(row);
        float* const to = plan.mix_normed_ + row * row_stride(plan.mix_shared_size_);
        NormJob own = m.norm.job;
        for (i32 first = 0; first < m.total_values; first += own.size) {
            own.weight = m.norm_weight.data() + first;
            kernels.elementwise->norm(own, from + first, to + first);
        }
        if (!m.is_gate_first) multiply(to, from + m.total_values, m.total_values);
    }
};

}  // namespace quire
