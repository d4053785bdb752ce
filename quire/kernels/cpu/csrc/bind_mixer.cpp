// Mixers with a recurrent state, for Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>

#include "binding.h"
#include "plan.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {
using namespace quire;

std::vector<float>& values_named(Mixer& m, const std::string& name) {
    if (name == "conv_weight") return m.conv_weight;
    if (name == "conv_bias") return m.conv_bias;
    if (name == "step") return m.step;
    if (name == "rates") return m.rates;
    if (name == "skip") return m.skip;
    if (name == "norm_weight") return m.norm_weight;
    throw std::invalid_argument("a mixer has no values named " + name);
}

}  // namespace

void bind_mixer(nb::module_& m) {
    m.attr("MAX_CONV_TAPS") = MAX_CONV_TAPS;
    nb::class_<Mixer> mixer(m, "Mixer");
#define QUIRE_FIELD(name) mixer.def_rw(#name, &Mixer::name)
    QUIRE_FIELD(k_heads);
    QUIRE_FIELD(v_heads);
    QUIRE_FIELD(k_dim);
    QUIRE_FIELD(v_dim);
    QUIRE_FIELD(taps);
    QUIRE_FIELD(first_value);
    QUIRE_FIELD(total_values);
    QUIRE_FIELD(out); QUIRE_FIELD(part_scales); QUIRE_FIELD(low_z); QUIRE_FIELD(low_a); QUIRE_FIELD(read);
    QUIRE_FIELD(step_up); QUIRE_FIELD(norm); QUIRE_FIELD(step_norm); QUIRE_FIELD(b_norm); QUIRE_FIELD(c_norm);
    QUIRE_FIELD(is_gate_first); QUIRE_FIELD(min_step); QUIRE_FIELD(max_step); QUIRE_FIELD(write_scale);
#undef QUIRE_FIELD
    mixer
        .def(
            "__init__",
            [](Mixer* self, i32 kind) {
                new (self) Mixer();
                self->kind = static_cast<MixerKind>(kind);
            },
            "kind"_a, "kind: 0 gated delta net, 1 short convolution, 2 Mamba 2, 3 Mamba 1.")
        .def(
            "add", [](Mixer& self, std::shared_ptr<NativeWeight> weight) { self.in.push_back(std::move(weight)); }, "weight"_a,
            "Add the next part of the projected input, see plan.h.")
        .def(
            "set",
            [](Mixer& self, const std::string& name, uintptr_t address, i64 count) {
                const float* const values = reinterpret_cast<const float*>(address);
                values_named(self, name).assign(values, values + count);
            },
            "name"_a, "address"_a, "count"_a, "Copy f32 values: conv_weight, conv_bias, step, rates, skip or norm_weight.")
        .def(
            "set_states",
            [](Mixer& self, uintptr_t conv_states, bool is_bf16, uintptr_t states) {
                self.conv_states = reinterpret_cast<u8*>(conv_states);
                self.is_bf16 = is_bf16;
                self.states = reinterpret_cast<float*>(states);
            },
            "conv_states"_a, "is_bf16"_a, "states"_a, "Set the addresses of the rows of states.");
}
