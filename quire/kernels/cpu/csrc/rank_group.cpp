#include "rank_group.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <stdexcept>
#include <string>

namespace quire {

namespace {

[[noreturn]] void fail(const char* what, i64 num_bytes) {
    throw std::runtime_error(
        std::string(what) + " of " + std::to_string(num_bytes) + " bytes that ranks share: " + strerror(errno));
}

}  // namespace

SharedRows::~SharedRows() {
    if (data_ != nullptr) munmap(data_, static_cast<size_t>(num_bytes_));
}

u8* SharedRows::reserve(i64 num_bytes) {
    if (num_bytes <= num_bytes_) return data_;
    struct stat status;
    if (fstat(file_, &status) != 0) fail("looking up the file", num_bytes);
    // Another rank may already have enlarged it; all request the same size.
    if (status.st_size < num_bytes && ftruncate(file_, num_bytes) != 0) fail("making a file", num_bytes);
    void* mapped = mmap(nullptr, static_cast<size_t>(num_bytes), PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
    if (mapped == MAP_FAILED) fail("mapping a file", num_bytes);
    if (data_ != nullptr) munmap(data_, static_cast<size_t>(num_bytes_));
    data_ = static_cast<u8*>(mapped);
    num_bytes_ = num_bytes;
    return data_;
}

void RankGroup::meet() {
    ++num_barriers;
    i64 num_bytes = 0;
    for (const WrittenBlock& block : written) num_bytes += block.count * block.num_bytes;
    add_count(&barrier->ranks[rank].num_bytes, static_cast<u64>(num_bytes));
    if (exchange && !is_aborted) {
        arrive_at_barrier(barrier, rank);
        const i64 began_ns = monotonic_ns();
        is_aborted = !exchange(rows.data(), written);
        count_wait(barrier, rank, monotonic_ns() - began_ns);
    } else {
        is_aborted = is_aborted || !process_barrier_wait(barrier, rank, size);
    }
    written.clear();
}

}  // namespace quire
