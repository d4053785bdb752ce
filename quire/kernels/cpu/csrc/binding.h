// Shared code of the binding sources.
#pragma once
#include <stdexcept>
#include <string>

#include "tables.h"

namespace quire {

// The kernels of a named instruction set, or of the chosen one for "". Throws invalid_argument if the machine cannot run it.
inline const Kernels& kernels_for(const std::string& isa) {
    const Kernels* found = isa.empty() ? &kernels() : kernels_named(isa.c_str());
    if (found == nullptr)
        throw std::invalid_argument(
            "isa: got '" + isa + "', an instruction set that this machine cannot run; see supported_isas()");
    return *found;
}

}  // namespace quire
