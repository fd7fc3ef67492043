// Many elements made one, along some dimensions or all.
#include "operator.h"

using namespace npusim;

namespace {

// Dimensions as ATen has them: none means all.
at::OptionalIntArrayRef along(const Ints& dimensions) {
  if (dimensions.empty()) return std::nullopt;
  return at::IntArrayRef(dimensions);
}

}  // namespace

OPERATOR(aclnnReduceSum, [](const Tensor& self, const Ints& dimensions, bool keep,
                            at::ScalarType type, Out& out) {
  out = at::sum(self, along(dimensions), keep, type);
});

OPERATOR(aclnnMean, [](const Tensor& self, const Ints& dimensions, bool keep, at::ScalarType type,
                       Out& out) { out = at::mean(self, along(dimensions), keep, type); });

OPERATOR(aclnnAmax, [](const Tensor& self, const Ints& dimensions, bool keep, Out& out) {
  out = at::amax(self, dimensions, keep);
});

OPERATOR(aclnnAmin, [](const Tensor& self, const Ints& dimensions, bool keep, Out& out) {
  out = at::amin(self, dimensions, keep);
});

OPERATOR(aclnnMax, [](const Tensor& self, Out& out) { out = at::max(self); });
OPERATOR(aclnnMin, [](const Tensor& self, Out& out) { out = at::min(self); });

OPERATOR(aclnnMaxDim, [](const Tensor& self, int64_t dimension, bool keep, Out& values,
                         Out& indices) {
  const auto [found, at] = at::max(self, dimension, keep);
  values = found;
  indices = at;
});

OPERATOR(aclnnMinDim, [](const Tensor& self, int64_t dimension, bool keep, Out& values,
                         Out& indices) {
  const auto [found, at] = at::min(self, dimension, keep);
  values = found;
  indices = at;
});

OPERATOR(aclnnArgMax, [](const Tensor& self, int64_t dimension, bool keep, Out& out) {
  out.cast(at::argmax(self, dimension, keep));
});

OPERATOR(aclnnArgMin, [](const Tensor& self, int64_t dimension, bool keep, Out& out) {
  out.cast(at::argmin(self, dimension, keep));
});

OPERATOR(aclnnAll, [](const Tensor& self, const Ints& dimensions, bool keep, Out& out) {
  out.cast(at::all(self, along(dimensions), keep));
});

OPERATOR(aclnnAny, [](const Tensor& self, const Ints& dimensions, bool keep, Out& out) {
  out.cast(at::any(self, along(dimensions), keep));
});

OPERATOR(aclnnProd, [](const Tensor& self, at::ScalarType type, Out& out) {
  out = at::prod(self, type);
});

OPERATOR(aclnnProdDim, [](const Tensor& self, int64_t dimension, bool keep, at::ScalarType type,
                          Out& out) { out = at::prod(self, dimension, keep, type); });

OPERATOR(aclnnCumsum, [](const Tensor& self, int64_t dimension, at::ScalarType type, Out& out) {
  out = at::cumsum(self, dimension, type);
});

OPERATOR(aclnnCumprod, [](const Tensor& self, const Scalar& dimension, at::ScalarType type,
                          Out& out) { out = at::cumprod(self, dimension.toLong(), type); });

OPERATOR(aclnnCummax, [](const Tensor& self, int64_t dimension, Out& values, Out& indices) {
  const auto [found, at] = at::cummax(self, dimension);
  values = found;
  indices.cast(at);
});

OPERATOR(aclnnCummin, [](const Tensor& self, int64_t dimension, Out& values, Out& indices) {
  const auto [found, at] = at::cummin(self, dimension);
  values = found;
  indices.cast(at);
});

OPERATOR(aclnnLogSumExp, [](const Tensor& self, const Ints& dimensions, bool keep, Out& out) {
  out = at::logsumexp(self, dimensions, keep);
});

OPERATOR(aclnnLinalgVectorNorm, [](const Tensor& self, const Scalar& power, const Ints& dimensions,
                                   bool keep, at::ScalarType type, Out& out) {
  out = at::linalg_vector_norm(self, power, along(dimensions), keep, type);
});

OPERATOR(aclnnVarCorrection, [](const Tensor& self, const Ints& dimensions, int64_t correction,
                                bool keep, Out& out) {
  out = at::var(self, along(dimensions), Scalar(correction), keep);
});

OPERATOR(aclnnStd, [](const Tensor& self, const Ints& dimensions, int64_t correction, bool keep,
                      Out& out) {
  out = at::std(self, along(dimensions), Scalar(correction), keep);
});

OPERATOR(aclnnMedian, [](const Tensor& self, Out& out) { out = at::median(self); });

OPERATOR(aclnnBincount, [](const Tensor& self, const MaybeTensor& weights, int64_t, Out& out) {
  out.convert(at::bincount(self, weights, out.tensor().numel()));
});

OPERATOR(aclnnHistc, [](const Tensor& self, int64_t bins, const Scalar& least, const Scalar& most,
                        Out& out) {
  out.cast(at::histc(self.to(at::kDouble), bins, least, most));
});

OPERATOR(aclnnTrace, [](const Tensor& self, Out& out) { out.convert(at::trace(self)); });
