// A packed weight with the memory that it points to.
#pragma once
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "pack.h"
#include "tables.h"

namespace quire {

struct Memory {
    u8* data = nullptr;
    i64 bytes = 0;

    explicit Memory(i64 size) : data(size > 0 ? allocate(size) : nullptr), bytes(size) {
        if (size > 0 && data == nullptr)
            throw std::runtime_error("out of memory: " + std::to_string(size) + " bytes could not be mapped");
    }
    Memory(Memory&& other) noexcept : data(std::exchange(other.data, nullptr)), bytes(std::exchange(other.bytes, 0)) {}
    Memory& operator=(Memory&& other) noexcept {
        std::swap(data, other.data);
        std::swap(bytes, other.bytes);
        return *this;
    }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    ~Memory() { release(data, bytes); }
};

// Memory of a weight: a part of a slab of huge pages that several weights share, so that small ones have huge pages too. A slab
// is freed with its last weight.
struct Part {
    std::shared_ptr<Memory> slab;
    u8* data = nullptr;
    i64 bytes = 0;

    static Part of(i64 size);
};

struct NativeWeight {
    Weight weight;
    Part memory, scales, offsets, block_scales, column_scales, biases, column_order;
    // bf12: panel after panel, and where those of each are.
    std::vector<Exception> exceptions;
    std::vector<Window> windows;

    NativeWeight(const std::string& format, i32 n, i32 k, i32 group, i32 input_group);
    void pack(
        uintptr_t source, i64 stride, i32 first, i32 count, uintptr_t levels, int num_levels, bool is_mapped, int num_threads);
    void set_extras(uintptr_t group_scales, uintptr_t group_offsets, uintptr_t column_scale, uintptr_t bias, uintptr_t columns,
        uintptr_t block_scales);
    // Replace the exceptions of some panels.
    void take_exceptions(size_t first_panel, const std::vector<std::vector<Exception>>& found);
    i64 num_bytes() const;
};

// The rows of an input with their memory.
struct PackedMemory {
    Packed packed;
    std::vector<u32> words;
    std::vector<float> scales, sums;
    std::vector<i32> starts;

    PackedMemory() = default;
    PackedMemory(const LinearTable& table, const Weight& weight, i32 m) { prepare(table, weight, m); }
    // Allocate m rows of the input of a weight; earlier rows are lost.
    void prepare(const LinearTable& table, const Weight& weight, i32 m);
};

// The best of the threads' candidates of one row and its value; -1 when there is none.
i32 best_of(const float* values, const i32* indices, i32 count, float& value);

}  // namespace quire
