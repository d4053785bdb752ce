// Collectives over shared memory: see process_collectives.h.
#include "process_collectives.h"

#include <string.h>

namespace quire {
namespace {

i64 least(i64 a, i64 b) { return a < b ? a : b; }

i64 size_of(SumType type) { return type == SumType::f32 ? 4 : 2; }

float to_f32(u16 value) {
    const u32 bits = static_cast<u32>(value) << 16;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}

// To the nearest, ties to even; NaN stays NaN.
u16 to_bf16(float value) {
    u32 bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<u16>(bits >> 16 | 0x40u);
    return static_cast<u16>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

constexpr i64 BLOCK = 256;  // elements that are summed in f32 before they are rounded

// out[i] = parts[0][i] + parts[1][i] + ..., from the left, for i in [first, last).
void sum_f32(const u8* parts, i64 stride_bytes, int num_parts, float* out, i64 first, i64 last) {
    for (i64 begin = first; begin < last; begin += BLOCK) {
        const i64 n = least(BLOCK, last - begin);
        float sums[BLOCK];
        memcpy(sums, parts + begin * 4, static_cast<size_t>(n) * 4);
        for (int part = 1; part < num_parts; ++part) {
            const float* values = reinterpret_cast<const float*>(parts + part * stride_bytes) + begin;
            for (i64 i = 0; i < n; ++i) sums[i] += values[i];
        }
        memcpy(out + begin, sums, static_cast<size_t>(n) * 4);
    }
}

void sum_bf16(const u8* parts, i64 stride_bytes, int num_parts, u16* out, i64 first, i64 last) {
    for (i64 begin = first; begin < last; begin += BLOCK) {
        const i64 n = least(BLOCK, last - begin);
        float sums[BLOCK];
        for (int part = 0; part < num_parts; ++part) {
            const u16* values = reinterpret_cast<const u16*>(parts + part * stride_bytes) + begin;
            if (part == 0)
                for (i64 i = 0; i < n; ++i) sums[i] = to_f32(values[i]);
            else
                for (i64 i = 0; i < n; ++i) sums[i] += to_f32(values[i]);
        }
        for (i64 i = 0; i < n; ++i) out[begin + i] = to_bf16(sums[i]);
    }
}

void sum_parts(const u8* parts, i64 stride_bytes, int num_parts, u8* out, i64 first, i64 last, SumType type) {
    if (type == SumType::f32)
        sum_f32(parts, stride_bytes, num_parts, reinterpret_cast<float*>(out), first, last);
    else
        sum_bf16(parts, stride_bytes, num_parts, reinterpret_cast<u16*>(out), first, last);
}

// A rank's slice of count elements, in whole cache lines if there are enough.
i64 slice_start(i64 count, int rank, int size) {
    const i64 lines = (count + 31) / 32;
    return least(lines * rank / size * 32, count);
}

u8* slot(const CollectiveGroup& group, int rank) { return group.slots + rank * group.slot_bytes; }

void copy(void* to, const void* from, i64 bytes) {
    if (bytes > 0) memcpy(to, from, static_cast<size_t>(bytes));
}

i64 largest(const i64* sizes, int count) {
    i64 most = 0;
    for (int i = 0; i < count; ++i) most = sizes[i] > most ? sizes[i] : most;
    return most;
}

// The bytes of a part that are in the round that begins at `begin`.
i64 bytes_in_round(i64 part_bytes, i64 begin, i64 round_bytes) {
    return part_bytes <= begin ? 0 : least(part_bytes - begin, round_bytes);
}

// Copy a part for each rank, of these bytes, into the own slot, sub_bytes apart.
void write_parts(CollectiveGroup& group, const u8* x, const i64* part_bytes, i64 begin, i64 sub_bytes) {
    i64 offset = 0;
    for (int to = 0; to < group.size; ++to) {
        copy(slot(group, group.rank) + to * sub_bytes, x + offset + begin, bytes_in_round(part_bytes[to], begin, sub_bytes));
        offset += part_bytes[to];
    }
}

}  // namespace

bool ordered_sum(
    BarrierState* state, int rank, int size, const void* parts, i64 part_stride, void* out, i64 count, SumType type) {
    if (!process_barrier_wait(state, rank, size)) return false;
    sum_parts(static_cast<const u8*>(parts), part_stride * size_of(type), size, static_cast<u8*>(out),
        slice_start(count, rank, size), slice_start(count, rank + 1, size), type);
    return process_barrier_wait(state, rank, size);
}

bool all_reduce(CollectiveGroup& group, void* x, i64 count, SumType type) {
    const i64 width = size_of(type), most = group.slot_bytes / width;
    u8* result = slot(group, group.size);
    for (i64 begin = 0; begin < count; begin += most) {
        const i64 n = least(most, count - begin);
        u8* piece = static_cast<u8*>(x) + begin * width;
        copy(slot(group, group.rank), piece, n * width);
        if (!group.wait_barrier(group)) return false;
        sum_parts(group.slots, group.slot_bytes, group.size, result, slice_start(n, group.rank, group.size),
            slice_start(n, group.rank + 1, group.size), type);
        if (!group.wait_barrier(group)) return false;
        // The next write to `result` happens after the next barrier, which this rank reaches after the copy.
        copy(piece, result, n * width);
    }
    return true;
}

bool reduce_scatter(CollectiveGroup& group, void* out, const void* x, const i64* counts, SumType type) {
    const i64 width = size_of(type), sub_bytes = group.slot_bytes / group.size / 64 * 64, most = sub_bytes / width;
    i64 part_bytes[MAX_RANKS];
    for (int rank = 0; rank < group.size; ++rank) part_bytes[rank] = counts[rank] * width;
    const i64 rounds_end = largest(counts, group.size);
    for (i64 begin = 0; begin < rounds_end; begin += most) {
        write_parts(group, static_cast<const u8*>(x), part_bytes, begin * width, sub_bytes);
        if (!group.wait_barrier(group)) return false;
        const i64 n = bytes_in_round(counts[group.rank], begin, most);
        sum_parts(group.slots + group.rank * sub_bytes, group.slot_bytes, group.size, static_cast<u8*>(out) + begin * width, 0, n,
            type);
        if (!group.wait_barrier(group)) return false;
    }
    return true;
}

bool all_gather(CollectiveGroup& group, void* out, const void* part, const i64* part_bytes) {
    const i64 rounds_end = largest(part_bytes, group.size);
    for (i64 begin = 0; begin < rounds_end; begin += group.slot_bytes) {
        copy(slot(group, group.rank), static_cast<const u8*>(part) + begin,
            bytes_in_round(part_bytes[group.rank], begin, group.slot_bytes));
        if (!group.wait_barrier(group)) return false;
        i64 offset = 0;
        for (int from = 0; from < group.size; ++from) {
            copy(static_cast<u8*>(out) + offset + begin, slot(group, from),
                bytes_in_round(part_bytes[from], begin, group.slot_bytes));
            offset += part_bytes[from];
        }
        if (!group.wait_barrier(group)) return false;
    }
    return true;
}

bool all_to_all(CollectiveGroup& group, void* out, const i64* out_bytes, const void* x, const i64* in_bytes, int* mismatch) {
    // All sizes are exchanged first: every rank must run the same number of rounds, and report the same faulty rank.
    copy(slot(group, group.rank), in_bytes, group.size * 8);
    copy(slot(group, group.rank) + MAX_RANKS * 8, out_bytes, group.size * 8);
    if (!group.wait_barrier(group)) return false;
    i64 rounds_end = 0;
    *mismatch = -1;
    for (int from = 0; from < group.size; ++from) {
        const i64* sent = reinterpret_cast<const i64*>(slot(group, from));
        for (int to = 0; to < group.size; ++to) {
            const i64* expected = reinterpret_cast<const i64*>(slot(group, to) + MAX_RANKS * 8);
            if (sent[to] != expected[from] && *mismatch < 0) *mismatch = from;
            if (sent[to] > rounds_end) rounds_end = sent[to];
        }
    }
    if (!group.wait_barrier(group)) return false;
    if (*mismatch >= 0) return true;
    const i64 sub_bytes = group.slot_bytes / group.size / 64 * 64;
    for (i64 begin = 0; begin < rounds_end; begin += sub_bytes) {
        write_parts(group, static_cast<const u8*>(x), in_bytes, begin, sub_bytes);
        if (!group.wait_barrier(group)) return false;
        i64 offset = 0;
        for (int from = 0; from < group.size; ++from) {
            copy(static_cast<u8*>(out) + offset + begin, slot(group, from) + group.rank * sub_bytes,
                bytes_in_round(out_bytes[from], begin, sub_bytes));
            offset += out_bytes[from];
        }
        if (!group.wait_barrier(group)) return false;
    }
    return true;
}

bool broadcast(CollectiveGroup& group, void* x, i64 bytes, int source) {
    for (i64 begin = 0; begin < bytes; begin += group.slot_bytes) {
        const i64 n = least(group.slot_bytes, bytes - begin);
        if (group.rank == source) copy(slot(group, source), static_cast<u8*>(x) + begin, n);
        if (!group.wait_barrier(group)) return false;
        if (group.rank != source) copy(static_cast<u8*>(x) + begin, slot(group, source), n);
        if (!group.wait_barrier(group)) return false;
    }
    return true;
}

bool send_message(CollectiveGroup& group, Mailbox* mailbox, i64 mailbox_bytes, const void* x, i64 bytes, int peer) {
    u8* piece = reinterpret_cast<u8*>(mailbox + 1);
    for (i64 begin = 0; begin < bytes; begin += mailbox_bytes) {
        const u32 written = __atomic_load_n(&mailbox->written.value, __ATOMIC_RELAXED);
        if (!group.wait_counter(group, &mailbox->read, written, peer)) return false;
        copy(piece, static_cast<const u8*>(x) + begin, least(mailbox_bytes, bytes - begin));
        advance_counter(&mailbox->written, written + 1);
    }
    return true;
}

bool receive_message(CollectiveGroup& group, Mailbox* mailbox, i64 mailbox_bytes, void* x, i64 bytes, int peer) {
    const u8* piece = reinterpret_cast<const u8*>(mailbox + 1);
    for (i64 begin = 0; begin < bytes; begin += mailbox_bytes) {
        const u32 read = __atomic_load_n(&mailbox->read.value, __ATOMIC_RELAXED);
        if (!group.wait_counter(group, &mailbox->written, read + 1, peer)) return false;
        copy(static_cast<u8*>(x) + begin, piece, least(mailbox_bytes, bytes - begin));
        advance_counter(&mailbox->read, read + 1);
    }
    return true;
}

}  // namespace quire
