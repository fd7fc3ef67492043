// Order.
#include "operator.h"

using namespace npusim;

OPERATOR(aclnnSort, [](const Tensor& self, bool stable, int64_t dimension, bool descending,
                       Out& values, Out& indices) {
  const auto [sorted, from] = at::sort(self, stable, dimension, descending);
  values = sorted;
  indices = from;
});

OPERATOR(aclnnTopk, [](const Tensor& self, int64_t k, int64_t dimension, bool largest, bool sorted,
                       Out& values, Out& indices) {
  const auto [found, from] = at::topk(self, k, dimension, largest, sorted);
  values = found;
  indices.cast(from);
});

OPERATOR(aclnnKthvalue, [](const Tensor& self, int64_t k, int64_t dimension, bool keep, Out& values,
                           Out& indices) {
  const auto [found, from] = at::kthvalue(self, k, dimension, keep);
  values = found;
  indices = from;
});

OPERATOR(aclnnSearchSorted, [](const Tensor& sequence, const Tensor& self, bool in_int32,
                               bool right, const MaybeTensor& sorter, Out& out) {
  out = at::searchsorted(sequence, self, in_int32, right, std::nullopt, sorter);
});

OPERATOR(aclnnSearchSorteds, [](const Tensor& sequence, const Scalar& self, bool in_int32,
                                bool right, const MaybeTensor& sorter, Out& out) {
  out = at::searchsorted(sequence, self, in_int32, right, std::nullopt, sorter)
            .reshape(out.tensor().sizes());
});

// How many values there are is known at the end only, so the host waits. A result that was not
// asked for has no room.
WAITING_OPERATOR(aclnnUnique2, [](const Tensor& self, bool sorted, bool inverse, bool counts,
                                  Out& values, Out& where, Out& many) {
  const auto [found, at, of_each] = at::_unique2(self, sorted, inverse, counts);
  values.shorten(found);
  if (inverse) where = at;
  if (counts) many.shorten(of_each);
});
