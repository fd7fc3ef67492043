#include "arrays.h"
#include "bindings.h"
#include "checksum.h"

namespace equipoise {
namespace {

using namespace nb::literals;

std::uint64_t py_checksum(nb::handle data) {
    const Array<const std::uint8_t> bytes("data", data, 1);
    nb::gil_scoped_release unlocked;
    return checksum(bytes.view());
}

}  // namespace

void bind_checksum(nb::module_& m) {
    m.def("checksum", &py_checksum, "data"_a,
          "Fingerprint of bytes by value and position; semantics in hal/checksum.py.");
}

}  // namespace equipoise
