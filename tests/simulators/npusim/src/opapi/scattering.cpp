// Writing elements by their places.
#include <algorithm>

#include "indices.h"
#include "operator.h"

using namespace npusim;

namespace {

// How CANN numbers what happens to the element that is there.
std::optional<c10::string_view> reduction(int64_t number) {
  if (number == 0) return std::nullopt;
  return number == 1 ? "add" : "multiply";
}

Tensor scattered(const Tensor& self, int64_t dimension, const Tensor& index, const Tensor& source,
                 int64_t number) {
  const auto how = reduction(number);
  return how ? at::scatter(self, dimension, wide(index), source, *how)
             : at::scatter(self, dimension, wide(index), source);
}

Tensor scattered(const Tensor& self, int64_t dimension, const Tensor& index, const Scalar& value,
                 int64_t number) {
  const auto how = reduction(number);
  return how ? at::scatter(self, dimension, wide(index), value, *how)
             : at::scatter(self, dimension, wide(index), value);
}

// `count` rows of the target, from row `first` of the source on; a source without dimensions is one
// element.
void copy_rows(Tensor target, int64_t dimension, const Tensor& rows, const Tensor& source,
               int64_t first, int64_t count) {
  if (count == 0) return;
  const Tensor part = source.dim() == 0 ? source : source.narrow(dimension, first, count);
  target.index_copy_(dimension, rows.narrow(0, first, count), part);
}

// How torch_npu numbers reductions (op_plugin/ops/opapi/ScatterReduceKernelNpuOpApi.cpp).
c10::string_view reducing(int64_t number) {
  static const c10::string_view names[] = {"sum", "prod", "amax", "amin", "mean"};
  if (number < 1 || number > 5) throw Failure(kInvalidParam, "an unknown reduction");
  return names[number - 1];
}

}  // namespace

OPERATOR(aclnnScatter, [](const Tensor& self, int64_t dimension, const Tensor& index,
                          const Tensor& source, int64_t reduce, Out& out) {
  out = scattered(self, dimension, index, source, reduce);
});

OPERATOR(aclnnScatterValue, [](const Tensor& self, int64_t dimension, const Tensor& index,
                               const Scalar& value, int64_t reduce, Out& out) {
  out = scattered(self, dimension, index, value, reduce);
});

OPERATOR(aclnnInplaceScatter, [](Out& self, int64_t dimension, const Tensor& index,
                                 const Tensor& source, int64_t reduce) {
  self = scattered(self.tensor(), dimension, index, source, reduce);
});

OPERATOR(aclnnInplaceScatterValue, [](Out& self, int64_t dimension, const Tensor& index,
                                      const Scalar& value, int64_t reduce) {
  self = scattered(self.tensor(), dimension, index, value, reduce);
});

OPERATOR(aclnnScatterAdd, [](const Tensor& self, int64_t dimension, const Tensor& index,
                             const Tensor& source, Out& out) {
  out = at::scatter_add(self, dimension, wide(index), source);
});

OPERATOR(aclnnScatterReduce, [](const Tensor& self, int64_t dimension, const Tensor& index,
                                const Tensor& source, int64_t reduce, bool include_self,
                                Out& out) {
  out = at::scatter_reduce(self, dimension, wide(index), source, reducing(reduce), include_self);
});

OPERATOR(aclnnInplaceScatterReduce, [](Out& self, int64_t dimension, const Tensor& index,
                                       const Tensor& source, int64_t reduce, bool include_self) {
  self = at::scatter_reduce(self.tensor(), dimension, wide(index), source, reducing(reduce),
                            include_self);
});

OPERATOR(aclnnIndexCopy, [](const Tensor& self, int64_t dimension, const Tensor& index,
                            const Tensor& source, Out& out) {
  out = at::index_copy(self, dimension, wide(index), source);
});

// Changes nothing but the named rows, and these half by half.
OPERATOR(aclnnInplaceIndexCopy, [](Out& self, int64_t dimension, const Tensor& index,
                                   const Tensor& source) {
  const Tensor target = self.tensor();
  const Tensor rows = wide(index).reshape({-1});
  const int64_t half = rows.numel() / 2;
  const int64_t rest = rows.numel() - half;
  self.step([=] { copy_rows(target, dimension, rows, source, 0, half); });
  self.step([=] { copy_rows(target, dimension, rows, source, half, rest); });
});

OPERATOR(aclnnIndexAdd, [](const Tensor& self, int64_t dimension, const Tensor& index,
                           const Tensor& source, const Scalar& alpha, Out& out) {
  out = at::index_add(self, dimension, index, source, alpha);
});

OPERATOR(aclnnIndexFill, [](const Tensor& self, int64_t dimension, const Tensor& index,
                            const Scalar& value, Out& out) {
  out = at::index_fill(self, dimension, wide(index), value);
});

OPERATOR(aclnnInplaceIndexFill, [](Out& self, int64_t dimension, const Tensor& index,
                                   const Scalar& value) {
  self = at::index_fill(self.tensor(), dimension, wide(index), value);
});

OPERATOR(aclnnIndexPutImpl, [](Out& self, const Tensors& indices, const Tensor& values,
                               bool accumulate, bool) {
  const auto empty = [](const Tensor& index) { return index.numel() == 0; };
  if (std::all_of(indices.begin(), indices.end(), empty)) return;  // nothing is named
  Tensor target = self.tensor();
  self.step([=]() mutable { target.index_put_(places(indices), values, accumulate); });
});

OPERATOR(aclnnInplacePut, [](Out& self, const Tensor& index, const Tensor& source,
                             bool accumulate) {
  self = at::put(self.tensor(), wide(index), source, accumulate);
});

OPERATOR(aclnnInplaceMaskedScatter, [](Out& self, const Tensor& mask, const Tensor& source) {
  self = at::masked_scatter(self.tensor(), mask, source);
});
