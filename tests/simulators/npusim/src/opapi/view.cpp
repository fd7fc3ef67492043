#include <algorithm>

#include "errors.h"
#include "fault.h"
#include "memory.h"
#include "objects.h"

namespace npusim {
namespace {

// Formats whose elements lie as the strides say: NCHW, NHWC, ND, NDHWC, NCDHW, NC, NCL.
bool strided(int format) {
  for (const int known : {-1, 0, 1, 2, 27, 30, 35, 47}) {
    if (format == known) return true;
  }
  return false;
}

struct Reach {
  int64_t first = 0;
  int64_t last = 0;
};

// The lowest and the highest element of a tensor that has some.
Reach reach(const aclTensor& tensor) {
  Reach found{tensor.offset, tensor.offset};
  for (size_t k = 0; k < tensor.sizes.size(); ++k) {
    const int64_t far = (tensor.sizes[k] - 1) * tensor.strides[k];
    (far < 0 ? found.first : found.last) += far;
  }
  return found;
}

}  // namespace

at::Tensor view(const aclTensor& tensor, const char* what) {
  const at::TensorOptions options(tensor.dtype);
  const auto& sizes = tensor.sizes;
  if (!strided(tensor.format)) {
    const std::string wrong = text("%s is given private format %d", what, tensor.format);
    fault(wrong);
    throw Failure(kInvalidParam, wrong);
  }
  if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) {
    return at::empty_strided(sizes, tensor.strides, options);
  }
  const Reach elements = reach(tensor);
  const auto width = static_cast<int64_t>(c10::elementSize(tensor.dtype));
  const auto* const first = static_cast<const uint8_t*>(tensor.data) + elements.first * width;
  const auto bytes = static_cast<size_t>((elements.last - elements.first + 1) * width);
  uint8_t* const lowest = host(first, bytes, what);
  uint8_t* const origin = lowest + (tensor.offset - elements.first) * width;
  return at::from_blob(origin, sizes, tensor.strides, options);
}

}  // namespace npusim
