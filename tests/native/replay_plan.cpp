// Builds the plan of a decoder and runs its steps from a file of recorded calls (tests/native_recording.py): a whole model without
// Python, so that it can be cross-compiled and run in an emulator. Arguments: the instruction set and the file. Prints the best tokens
// of every step, and at the end how many words of the recorded logits are different.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <fstream>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "native_weight.h"
#include "plan.h"
#include "runs.h"

using namespace quire;

namespace {

using Bytes = std::vector<u8>;

struct Reader {
    std::ifstream file;

    std::string word() {
        std::string found;
        if (!(file >> found)) throw std::runtime_error("the recording ends within a call");
        return found;
    }
    double number() { return strtod(word().c_str(), nullptr); }
    i32 integer() { return static_cast<i32>(number()); }
    // The bytes after the rest of a line.
    Bytes bytes(size_t size) {
        Bytes found(size);
        if (size > 0 && !file.read(reinterpret_cast<char*>(found.data()), static_cast<std::streamsize>(size))) throw std::runtime_error("the recording ends within data");
        return found;
    }
    template <class Value> std::vector<Value> values(size_t count) {
        const Bytes raw = bytes(count * sizeof(Value));
        std::vector<Value> found(count);
        if (count > 0) memcpy(found.data(), raw.data(), raw.size());
        return found;
    }
    void end_line() { file.get(); }
};

uintptr_t address(const Bytes& bytes) { return bytes.empty() ? 0 : reinterpret_cast<uintptr_t>(bytes.data()); }

struct Replay {
    Reader in;
    const Kernels& kernels;
    std::unique_ptr<Plan> plan;
    std::vector<std::shared_ptr<NativeWeight>> weights;
    std::vector<std::shared_ptr<PlanLayer>> layers;
    std::map<i32, Bytes> memory;  // of caches, by number
    std::vector<std::vector<float>> angles;
    i32 num_steps = 0;
    i64 num_words = 0, num_different = 0;

    std::shared_ptr<NativeWeight> weight() {
        const i32 index = in.integer();
        return index < 0 ? nullptr : weights.at(static_cast<size_t>(index));
    }
    PlanLayer& layer() { return *layers.at(static_cast<size_t>(in.integer())); }

    void add_weight() {
        const std::string format = in.word();
        const i32 n = in.integer(), k = in.integer(), group = in.integer(), input_group = in.integer();
        weights.push_back(std::make_shared<NativeWeight>(format, n, k, group, input_group));
    }
    void pack() {
        const std::shared_ptr<NativeWeight> to = weight();
        const i32 stride = in.integer(), first = in.integer(), count = in.integer(), num_levels = in.integer();
        const size_t size = static_cast<size_t>(in.number());
        in.end_line();
        const Bytes source = in.bytes(size), levels = in.bytes(static_cast<size_t>(num_levels));
        to->pack(address(source), stride, first, count, address(levels), num_levels, false, 1);
    }
    void set_extras() {
        const std::shared_ptr<NativeWeight> to = weight();
        size_t sizes[6];
        for (size_t& size : sizes) size = static_cast<size_t>(in.number());
        in.end_line();
        Bytes parts[6];
        for (int i = 0; i < 6; ++i) parts[i] = in.bytes(sizes[i]);
        to->set_extras(address(parts[0]), address(parts[1]), address(parts[2]), address(parts[3]), address(parts[4]), address(parts[5]));
    }
    Norm& norm(i32 owner, const std::string& name) {
#define PLAN_NORM(field) if (owner < 0 && name == #field) return plan->field;
        PLAN_NORM(final_norm) PLAN_NORM(embed_norm) PLAN_NORM(feature_norm) PLAN_NORM(per_layer_norm)
        PlanLayer& of = *layers.at(static_cast<size_t>(owner));
#define LAYER_NORM(field) if (name == #field) return of.field;
        LAYER_NORM(attn_in) LAYER_NORM(attn_out) LAYER_NORM(mlp_in) LAYER_NORM(mlp_out) LAYER_NORM(q_norm) LAYER_NORM(k_norm) LAYER_NORM(v_norm)
        LAYER_NORM(per_layer_norm)
        if (name == "latent_q_norm") return of.latent.q_norm;
        if (name == "latent_kv_norm") return of.latent.kv_norm;
        throw std::runtime_error("unknown norm " + name);
    }
    void set_norm() {
        const i32 owner = in.integer();
        Norm& to = norm(owner, in.word());
        const bool is_layer_norm = in.integer() != 0;
        const i32 size = in.integer();
        const float eps = static_cast<float>(in.number());
        const i32 num_heads = in.integer();
        const bool has_bias = in.integer() != 0;
        in.end_line();
        const size_t count = static_cast<size_t>(size) * static_cast<size_t>(num_heads);
        const std::vector<float> values = in.values<float>(count), bias = in.values<float>(has_bias ? count : 0);
        to.set(is_layer_norm, size, eps, reinterpret_cast<uintptr_t>(values.data()), has_bias ? reinterpret_cast<uintptr_t>(bias.data()) : 0, num_heads);
    }
    void set_number() {
        PlanLayer& to = layer();
        const std::string name = in.word();
        const double value = in.number();
#define NUMBER(field) if (name == #field) { to.field = static_cast<decltype(to.field)>(value); return; }
        NUMBER(num_heads) NUMBER(num_kv_heads) NUMBER(head_dim) NUMBER(window) NUMBER(rope) NUMBER(scale) NUMBER(softcap) NUMBER(residual_scale)
        NUMBER(is_qk_norm_whole) NUMBER(is_qk_norm_each) NUMBER(is_qk_norm_last) NUMBER(top_k) NUMBER(is_renormalized) NUMBER(is_parallel) NUMBER(clip)
        NUMBER(query_beta) NUMBER(query_max) NUMBER(query_offset) NUMBER(positive) NUMBER(negative) NUMBER(gate_limit) NUMBER(gate_slope)
        NUMBER(weighs_inputs) NUMBER(output_scale) NUMBER(attention_out_scale) NUMBER(mixer_out_scale) NUMBER(gate_scale) NUMBER(down_scale)
        NUMBER(is_expert_gated) NUMBER(has_head_gate) NUMBER(value_dim) NUMBER(value_scale)
        throw std::runtime_error("unknown number " + name);
    }
    void set_weight() {
        PlanLayer& to = layer();
        const std::string name = in.word();
        const std::shared_ptr<NativeWeight> value = weight();
#define WEIGHT(field) if (name == #field) { to.field = value; return; }
        WEIGHT(q) WEIGHT(k) WEIGHT(v) WEIGHT(o) WEIGHT(gate) WEIGHT(up) WEIGHT(down) WEIGHT(router) WEIGHT(shared_gate) WEIGHT(shared_up) WEIGHT(shared_down)
        WEIGHT(shared_scale) WEIGHT(per_layer_gate) WEIGHT(per_layer_up)
        throw std::runtime_error("unknown weight " + name);
    }
    void set_values() {
        PlanLayer& to = layer();
        const std::string name = in.word();
        const size_t count = static_cast<size_t>(in.number());
        in.end_line();
        const std::vector<float> values = in.values<float>(count);
        if (name != "sinks" && name != "slopes") throw std::runtime_error("unknown values " + name);
        (name == "sinks" ? to.sinks : to.slopes) = values;
    }
    void set_routing() {
        PlanLayer& to = layer();
        const i32 scoring = in.integer(), num_groups = in.integer(), top_groups = in.integer(), group_best = in.integer();
        const float least_sum = static_cast<float>(in.number()), scale = static_cast<float>(in.number()), threshold = static_cast<float>(in.number());
        const size_t count = static_cast<size_t>(in.number());
        in.end_line();
        to.routing.set(scoring, num_groups, top_groups, group_best, least_sum, scale, threshold, in.values<float>(count));
    }
    void add_expert() {
        PlanLayer& to = layer();
        const std::shared_ptr<NativeWeight> gate = weight(), up = weight();
        to.experts.push_back({gate, up, weight()});
    }
    void set_latent() {
        Latent& to = layer().latent;
        to.rank = in.integer(), to.nope = in.integer(), to.rope = in.integer(), to.value = in.integer();
        to.is_interleaved = in.integer() != 0;
        to.q_a = weight();
    }
    void add_latent_head() {
        PlanLayer& to = layer();
        const std::shared_ptr<NativeWeight> key_up = weight();
        to.latent.heads.push_back({key_up, weight()});
    }
    void set_cache() {
        PlanLayer& to = layer();
        const KvFormat format = static_cast<KvFormat>(in.integer());
        const i32 block_size = in.integer();
        u8* parts[4] = {};
        for (u8*& part : parts) {
            const i32 number = in.integer();
            const size_t size = static_cast<size_t>(in.number());
            if (number < 0) continue;
            Bytes& bytes = memory[number];
            bytes.resize(size);
            part = bytes.data();
        }
        to.kv = {format, block_size, to.cached_heads(), to.head_dim, parts[0], parts[1], reinterpret_cast<float*>(parts[2]), reinterpret_cast<float*>(parts[3])};
    }
    void set_angles() {
        const i32 index = in.integer();
        const i64 count = in.integer(), half = in.integer();
        in.end_line();
        for (int part = 0; part < 2; ++part) angles.push_back(in.values<float>(static_cast<size_t>(count * half)));
        plan->set_angles(index, angles[angles.size() - 2].data(), angles.back().data(), count, static_cast<i32>(half));
    }
    void set_per_layer_inputs() {
        const std::shared_ptr<NativeWeight> embed = weight(), projection = weight();
        const i32 size = in.integer();
        const float embed_scale = static_cast<float>(in.number()), projection_scale = static_cast<float>(in.number());
        plan->set_per_layer_inputs(embed, projection, size, embed_scale, projection_scale, static_cast<float>(in.number()));
    }
    // As `run` of bind_plan.cpp.
    void step() {
        const i32 num_tokens = in.integer(), num_sequences = in.integer(), max_blocks = in.integer(), num_rows = in.integer();
        const bool keeps_all = in.integer() != 0, has_logits = in.integer() != 0;
        in.end_line();
        const size_t sequences = static_cast<size_t>(num_sequences), rows = static_cast<size_t>(num_rows), vocab = static_cast<size_t>(plan->vocab());
        TokenRuns runs;
        runs.token_ids = in.values<i64>(static_cast<size_t>(num_tokens));
        runs.starts = in.values<i32>(sequences + 1), runs.ends = in.values<i32>(sequences), runs.origins.resize(sequences), runs.max_blocks = max_blocks;
        const std::vector<i64> tables = in.values<i64>(sequences * static_cast<size_t>(max_blocks));
        for (size_t s = 0; s < sequences; ++s) runs.tables.push_back(reinterpret_cast<uintptr_t>(tables.data() + s * static_cast<size_t>(max_blocks)));
        const std::vector<i32> wanted = in.values<i32>(rows);
        const std::vector<u32> recorded = in.values<u32>(has_logits ? rows * vocab : 0);
        const Placement placement(runs, plan->block_size(), {});
        StepInput input;
        placement.fill(input, runs);
        std::vector<i32> best(rows);
        std::vector<float> logits(recorded.size());
        input.wanted_rows = wanted.data(), input.num_wanted_rows = input.num_logit_rows = num_rows, input.keeps_all = keeps_all;
        if (has_logits) input.logits = logits.data();
        else input.best = best.data();
        plan->step(input);
        if (has_logits) best_tokens(kernels, logits.data(), plan->vocab(), num_rows, plan->vocab(), 1, best.data());
        printf("best");
        for (const i32 token : best) printf(" %d", token);
        printf("\n");
        for (size_t i = 0; i < recorded.size(); ++i) {
            u32 word;
            memcpy(&word, &logits[i], 4);
            num_different += word != recorded[i];
        }
        num_words += static_cast<i64>(recorded.size());
        ++num_steps;
    }
    void call(const std::string& name) {
        if (name == "weight") return add_weight();
        if (name == "pack") return pack();
        if (name == "extras") return set_extras();
        if (name == "norm") return set_norm();
        if (name == "layer") return layers.push_back(std::make_shared<PlanLayer>());
        if (name == "number") return set_number();
        if (name == "use") return set_weight();
        if (name == "values") return set_values();
        if (name == "routing") return set_routing();
        if (name == "expert") return add_expert();
        if (name == "latent") return set_latent();
        if (name == "latent_head") return add_latent_head();
        if (name == "cache") return set_cache();
        if (name == "angles") return set_angles();
        if (name == "per_layer_inputs") return set_per_layer_inputs();
        if (name == "step") return step();
        if (name == "add_layer") return plan->add_layer(layers.at(static_cast<size_t>(in.integer())));
        if (name == "finish") return plan->finish();
        if (name == "make_int8_head") return static_cast<void>(plan->make_int8_head());
        if (name == "near") return static_cast<void>(plan->is_near = in.integer() != 0);
        if (name == "activation") {
            PlanLayer& to = layer();
            to.activation = static_cast<Activation>(in.integer());
        } else if (name == "plan") {
            const i32 hidden = in.integer(), vocab = in.integer();
            plan = std::make_unique<Plan>(kernels, hidden, vocab, in.integer() != 0, 1);
        } else if (name == "embedding") {
            const std::shared_ptr<NativeWeight> embed = weight(), positions = weight();
            plan->set_embedding(embed, positions, static_cast<float>(in.number()));
        } else if (name == "head") {
            const std::shared_ptr<NativeWeight> head = weight();
            const float scale = static_cast<float>(in.number());
            plan->set_head(head, scale, static_cast<float>(in.number()));
        } else {
            throw std::runtime_error("unknown call " + name);
        }
    }
};

}  // namespace

int main(int argc, char** argv) {
    const Kernels* kernels = argc == 3 ? kernels_named(argv[1]) : nullptr;
    if (kernels == nullptr) return fprintf(stderr, "usage: replay_plan ISA FILE\n"), 2;
    try {
        Replay replay = {{std::ifstream(argv[2], std::ios::binary)}, *kernels, nullptr, {}, {}, {}, {}};
        if (!replay.in.file) throw std::runtime_error(std::string("no file ") + argv[2]);
        std::string name;
        while (replay.in.file >> name) replay.call(name);
        printf("%d steps, %lld of %lld words different\n", replay.num_steps, static_cast<long long>(replay.num_different), static_cast<long long>(replay.num_words));
    } catch (const std::exception& error) {
        return fprintf(stderr, "%s\n", error.what()), 1;
    }
    return 0;
}
