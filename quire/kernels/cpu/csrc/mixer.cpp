// Completing the mixers of a plan.
#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "plan.h"

namespace quire {

namespace {

// A norm that divides heads of `dim` values by their lengths, and by `divisor`.
Norm length_norm(i32 dim, float divisor) {
    Norm norm;
    const std::vector<float> weight(dim, 1.0f / (std::sqrt(static_cast<float>(dim)) * divisor));
    norm.set(false, dim, 1e-6f / static_cast<float>(dim), reinterpret_cast<uintptr_t>(weight.data()), 0, 1);
    return norm;
}

}  // namespace

void Plan::finish_mixer(PlanLayer& l) {
    Mixer& m = *l.mixer;
    if (has_homes() || has_context() || divides_rows() || entry_ != Entry::token || l.has_streams() || l.is_parallel ||
        (l.is_mixed() && l.attn_out.is_present) || (!m.part_scales.empty() && m.part_scales.size() != m.in.size()))
        throw std::invalid_argument(
            "a layer with a recurrent state has one residual stream, and ranks have some heads of all sequences");
    const i32 inputs[] = {6, 3, 5, 2};  // of each kind
    if (static_cast<i32>(m.in.size()) != inputs[static_cast<i32>(m.kind)] || m.taps < 2 || m.taps > MAX_CONV_TAPS ||
        m.k_dim > MAX_STATE_ROWS || m.k_heads < 1 || m.v_heads % m.k_heads != 0)
        throw std::invalid_argument("a mixer of other parts than the kernels know, or of more taps or rows of a state");
    const size_t channels = static_cast<size_t>(m.channels());
    if (m.conv_weight.size() != channels * m.taps || (!m.conv_bias.empty() && m.conv_bias.size() != channels))
        throw std::invalid_argument("the weights of a convolution");
    if (m.total_values == 0) m.total_values = m.values();
    i32 offset = 0;
    for (const auto& part : m.in) {
        m.in_forms.push_back(l.mixer_site().add(part->weight));
        m.offsets.push_back(offset);
        offset += part->weight.n;
    }
    m.offsets.push_back(offset);
    m.out_site.add(m.out->weight);
    if (m.low_z) m.low_z_site.add(m.low_z->weight);
    if (m.low_a) m.low_a_site.add(m.low_a->weight);
    if (m.kind == MixerKind::mamba1) {
        m.read_site.add(m.read->weight);
        m.step_site.add(m.step_up->weight);
        mix_low_size_ = std::max(mix_low_size_, m.read->weight.n);
    }
    if (m.low_z) mix_low_size_ = std::max(mix_low_size_, m.values() + m.num_decays());
    for (const Site* site : {&l.mixer_site(), &m.out_site, &m.low_z_site, &m.low_a_site, &m.read_site, &m.step_site})
        measure(*site, 1);
    if (m.kind == MixerKind::delta) {
        m.k_norm = length_norm(m.k_dim, 1.0f);
        m.q_norm = length_norm(m.k_dim, std::sqrt(static_cast<float>(m.k_dim)));
    }
    has_states_ = true;
    mix_in_size_ = std::max(mix_in_size_, offset);
    mix_conv_size_ = std::max(mix_conv_size_, m.channels());
    mix_shared_size_ = std::max(mix_shared_size_, m.shared_size());
    mix_values_ = std::max(mix_values_, m.values());
    mix_keys_ = std::max(mix_keys_, m.k_heads * m.k_dim);
    mix_decays_ = std::max(mix_decays_, m.num_decays());
    mix_heads_ = std::max(mix_heads_, m.v_heads);
}

}  // namespace quire
