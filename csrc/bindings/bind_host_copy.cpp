#include <nanobind/stl/vector.h>

#include <new>

#include "bindings/bindings.h"
#include "bindings/numpy_arrays.h"
#include "host_copy/copy_threads.h"

namespace equipoise {
namespace {

using namespace nb::literals;

void require_rate(double rate) {
    if (rate >= 0.0) return;  // refuses NaN too, which compares with nothing
    refuse("rate", "0 or more bytes a second", std::to_string(rate));
}

// Constructs in place, in the memory of the Python object: CopyThreads cannot be moved. The
// interpreter lock is released, because starting and pinning threads takes long.
void make_copy_threads(CopyThreads* self, const std::vector<std::vector<int>>& cpus,
                       std::int64_t chunk, double rate) {
    require_range("threads", static_cast<std::int64_t>(cpus.size()), 1, 1 << 10);
    require_range("chunk", chunk, kCacheLine, INT64_MAX);
    if (chunk % kCacheLine != 0) refuse("chunk", "a multiple of 64", std::to_string(chunk));
    require_rate(rate);
    nb::gil_scoped_release unlocked;
    new (self) CopyThreads(cpus, static_cast<std::uintptr_t>(chunk), rate);
}

std::vector<MemoryCopy> read_copies(nb::handle source) {
    const Array<const std::int64_t> rows("copies", source, 2);
    require_size("copies columns", rows.extent(1), 3);
    std::vector<MemoryCopy> copies;
    copies.reserve(rows.extent(0));
    for (std::size_t i = 0; i < rows.extent(0); ++i) {
        const auto row = rows.row(i);
        require_range("copies bytes", row[2], 0, INT64_MAX);
        copies.push_back({static_cast<std::uintptr_t>(row[0]), static_cast<std::uintptr_t>(row[1]),
                          static_cast<std::uintptr_t>(row[2])});
    }
    return copies;
}

CopyTicket py_submit(CopyThreads& self, nb::handle copies) {
    const std::vector<MemoryCopy> read = read_copies(copies);
    nb::gil_scoped_release unlocked;
    return self.submit(read);
}

// Without the interpreter lock, as for all that may wait.
int py_wait(const CopyTicket& self, double seconds) {
    nb::gil_scoped_release unlocked;
    return static_cast<int>(self.wait(seconds));
}

std::size_t py_close(CopyThreads& self, double seconds) {
    nb::gil_scoped_release unlocked;
    return self.close(seconds);
}

}  // namespace

void bind_host_copy(nb::module_& m) {
    nb::class_<CopyTicket>(m, "CopyTicket", "A list of copies under way.")
        .def("wait", &py_wait, "seconds"_a, "0 pending, 1 done, 2 given up.");
    nb::class_<CopyThreads>(m, "CopyThreads", "Threads that copy host memory.")
        .def("__init__", &make_copy_threads, "cpus"_a, "chunk"_a, "rate"_a)
        .def("submit", &py_submit, "copies"_a, "Begin to copy; see the stub.")
        .def("close", &py_close, "seconds"_a, "End every thread; how many tickets it gave up.");
}

}  // namespace equipoise
