// The Python module. Pointers are passed as integers (Tensor.data_ptr()); the caller has checked shapes and types.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "tables.h"
#include "thread_binding.h"

namespace nb = nanobind;

void bind_linear(nb::module_& m);
void bind_plan(nb::module_& m);
void bind_mixer(nb::module_& m);
void bind_attention(nb::module_& m);
void bind_elementwise(nb::module_& m);
void bind_sampler(nb::module_& m);
void bind_quantize(nb::module_& m);
void bind_peak(nb::module_& m);
void bind_recurrence(nb::module_& m);
void bind_process_barrier(nb::module_& m);
void bind_process_collectives(nb::module_& m);

NB_MODULE(_native, m) {
    m.doc() = "Native CPU kernels of quire.";
    // Objects that remain at interpreter exit are not leaks: objects that were frozen out of the garbage collector stay alive.
    nb::set_leak_warnings(false);
    m.def("isa", [] { return std::string(quire::kernels().name); }, "The instruction set whose kernels are used.");
    m.def(
        "supported_isas",
        [] {
            std::vector<std::string> names;
            for (const quire::Kernels* kernels : quire::supported_kernels()) names.emplace_back(kernels->name);
            return names;
        },
        "The instruction sets that this machine can run, from the lowest.");
    m.def("bind_threads", &quire::bind_teams, nb::arg("cores"),
        "Bind the threads of teams of len(cores) threads to these cores, by rank; none: to no cores from now on. False: not "
        "possible, nothing changed.");
    bind_linear(m);
    bind_plan(m);
    bind_mixer(m);
    bind_attention(m);
    bind_elementwise(m);
    bind_sampler(m);
    bind_quantize(m);
    bind_peak(m);
    bind_recurrence(m);
    bind_process_barrier(m);
    bind_process_collectives(m);
}
