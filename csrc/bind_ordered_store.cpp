#include <atomic>

#include "arrays.h"
#include "bindings.h"

namespace equipoise {
namespace {

using namespace nb::literals;

// What was stored before is seen before what is stored after, by other processors and by devices.
// C++ speaks of processors only: on aarch64 its barriers end at the inner shareable domain, and a
// device is in the outer one. On x86 stores stay in order, and this costs one fence.
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
    __atomic_store_n(cell.span().data, value, __ATOMIC_RELEASE);
}

}  // namespace

void bind_ordered_store(nb::module_& m) {
    m.def("store_release_system", &py_store_release_system, "word"_a, "value"_a,
          "Store into an int32 [1] after all stores before it, for processors and devices.");
}

}  // namespace equipoise
