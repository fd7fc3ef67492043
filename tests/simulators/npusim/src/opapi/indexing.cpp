// Reading elements by their places. A place outside the tensor is an error of the device, found at
// the next synchronisation; the host is not asked for.
#include "indices.h"
#include "operator.h"

using namespace npusim;

OPERATOR(aclnnGather, [](const Tensor& self, int64_t dimension, const Tensor& index, Out& out) {
  out = at::gather(self, dimension, wide(index));
});

OPERATOR(aclnnIndexSelect, [](const Tensor& self, int64_t dimension, const Tensor& index,
                              Out& out) { out = at::index_select(self, dimension, index); });

OPERATOR(aclnnIndex, [](const Tensor& self, const Tensors& indices, Out& out) {
  if (out.tensor().numel() > 0) out = at::index(self, places(indices));
});

OPERATOR(aclnnTake, [](const Tensor& self, const Tensor& index, Out& out) {
  out = at::take(self, wide(index));
});

OPERATOR(aclnnEmbedding, [](const Tensor& weight, const Tensor& indices, Out& out) {
  out = at::embedding(weight, indices);
});

OPERATOR(aclnnOneHot, [](const Tensor& self, int classes, const Tensor& on, const Tensor& off,
                         int64_t axis, Out& out) {
  const Tensor numbers = at::arange(classes, self.options());
  const Tensor hot = at::eq(self.unsqueeze(-1), numbers);
  out.convert(at::where(hot, on.reshape({}), off.reshape({})).movedim(-1, axis));
});

// How many elements there are is known at the end only, so the host waits.
WAITING_OPERATOR(aclnnMaskedSelect, [](const Tensor& self, const Tensor& mask, Out& out) {
  out.shorten(at::masked_select(self, mask));
});

WAITING_OPERATOR(aclnnNonzero, [](const Tensor& self, Out& out) {
  out.shorten(at::nonzero(self));
});

// One row per dimension, as many columns as there are elements.
WAITING_OPERATOR(aclnnNonzeroV2, [](const Tensor& self, Out& out) {
  out.shorten(at::nonzero(self).t().contiguous());
});

OPERATOR(aclnnRepeatInterleave, [](const Tensor& self, const Tensor& repeats, int64_t size,
                                   Out& out) {
  out = at::repeat_interleave(self.flatten(), repeats, 0, size);
});

OPERATOR(aclnnRepeatInterleaveWithDim, [](const Tensor& self, const Tensor& repeats,
                                          int64_t dimension, int64_t size, Out& out) {
  out = at::repeat_interleave(self, repeats, dimension, size);
});

OPERATOR(aclnnRepeatInterleaveInt, [](const Tensor& self, int64_t repeats, int64_t, Out& out) {
  out = at::repeat_interleave(self.flatten(), repeats, 0);
});

OPERATOR(aclnnRepeatInterleaveIntWithDim, [](const Tensor& self, int64_t repeats,
                                             int64_t dimension, int64_t, Out& out) {
  out = at::repeat_interleave(self, repeats, dimension);
});

OPERATOR(aclnnRepeatInterleaveTensor, [](const Tensor& repeats, int64_t size, Out& out) {
  out.convert(at::repeat_interleave(repeats, std::optional<int64_t>(size)));
});
