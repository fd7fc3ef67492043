// The same elements in another arrangement.
#include "operator.h"

using namespace npusim;

namespace {

// Tensors of one element count and no dimensions of their own are skipped, as torch does.
Tensors promoted(const Tensors& tensors, at::ScalarType type) {
  Tensors all;
  for (const Tensor& tensor : tensors) all.push_back(tensor.to(type));
  return all;
}

}  // namespace

OPERATOR(aclnnCat, [](const Tensors& tensors, int64_t dimension, Out& out) {
  out = at::cat(promoted(tensors, out.tensor().scalar_type()), dimension);
});

OPERATOR(aclnnStack, [](const Tensors& tensors, int64_t dimension, Out& out) {
  out = at::stack(promoted(tensors, out.tensor().scalar_type()), dimension);
});

OPERATOR(aclnnConstantPadNd, [](const Tensor& self, const Ints& pad, const Scalar& value,
                                Out& out) { out = at::constant_pad_nd(self, pad, value); });

OPERATOR(aclnnFlip, [](const Tensor& self, const Ints& dimensions, Out& out) {
  out = at::flip(self, dimensions);
});

OPERATOR(aclnnRoll, [](const Tensor& self, const Ints& shifts, const Ints& dimensions, Out& out) {
  out = at::roll(self, shifts, dimensions);
});

OPERATOR(aclnnRepeat, [](const Tensor& self, const Ints& repeats, Out& out) {
  out = self.repeat(repeats);
});
