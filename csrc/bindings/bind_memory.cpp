#include <atomic>

#include "bindings/bindings.h"
#include "bindings/numpy_arrays.h"
#include "common/checksum.h"

namespace equipoise {
namespace {

using namespace nb::literals;

std::uint64_t py_checksum(nb::handle data) {
    const Array<const std::uint8_t> bytes("data", data, 1);
    nb::gil_scoped_release unlocked;
    return checksum(bytes.view());
}

// Orders all stores before this point before all stores after it, as other processors and devices
// see them. C++ knows processors only: on aarch64 its barriers end at the inner shareable domain,
// and a device is in the outer one. On x86 stores stay in order, and this costs one fence.
void order_stores() {
    std::atomic_thread_fence(std::memory_order_seq_cst);
#if defined(__aarch64__)
    asm volatile("dmb osh" ::: "memory");
#endif
}

void py_store_release_system(nb::handle word, std::int32_t value) {
    const Array<std::int32_t> cell("word", word, 1);
    require_size("word", cell.size(), 1);
    order_stores();
    // Atomic, so that no compiler splits or repeats the store that a device polls.
    __atomic_store_n(cell.span().data, value, __ATOMIC_RELEASE);
}

}  // namespace

void bind_memory(nb::module_& m) {
    m.def("checksum", &py_checksum, "data"_a,
          "Checksum of bytes by value and position; semantics in hal/checksum.py.");
    m.def("store_release_system", &py_store_release_system, "word"_a, "value"_a,
          "Store into an int32 [1] after all stores before it, for processors and devices.");
}

}  // namespace equipoise
