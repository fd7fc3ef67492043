// Comparisons, and what is chosen by them.
#include "operator.h"

using namespace npusim;

#define COMPARISON(name, function)                                                              \
  OPERATOR(aclnn##name##Tensor, [](const Tensor& self, const Tensor& other, Out& out) {         \
    out.convert(function(self, other));                                                         \
  });                                                                                           \
  OPERATOR(aclnn##name##Scalar, [](const Tensor& self, const Scalar& other, Out& out) {         \
    out.convert(function(self, other));                                                         \
  });                                                                                           \
  OPERATOR(aclnnInplace##name##Tensor, [](Out& self, const Tensor& other) {                     \
    self.cast(function(self.tensor(), other));                                                  \
  });                                                                                           \
  OPERATOR(aclnnInplace##name##Scalar, [](Out& self, const Scalar& other) {                     \
    self.cast(function(self.tensor(), other));                                                  \
  })

COMPARISON(Eq, at::eq);
COMPARISON(Ne, at::ne);
COMPARISON(Lt, at::lt);
COMPARISON(Le, at::le);
COMPARISON(Gt, at::gt);
COMPARISON(Ge, at::ge);

OPERATOR(aclnnEqual, [](const Tensor& self, const Tensor& other, Out& out) {
  out = at::scalar_tensor(at::equal(self, other), at::TensorOptions(at::kBool))
            .reshape(out.tensor().sizes());
});

OPERATOR(aclnnIsClose, [](const Tensor& self, const Tensor& other, double relative,
                          double absolute, bool equal_nan, Out& out) {
  out = at::isclose(self, other, relative, absolute, equal_nan);
});

OPERATOR(aclnnMaximum, [](const Tensor& self, const Tensor& other, Out& out) {
  out.convert(at::maximum(self, other));
});

OPERATOR(aclnnMinimum, [](const Tensor& self, const Tensor& other, Out& out) {
  out.convert(at::minimum(self, other));
});

OPERATOR(aclnnSWhere, [](const Tensor& condition, const Tensor& self, const Tensor& other,
                         Out& out) { out.convert(at::where(condition, self, other)); });

OPERATOR(aclnnClamp, [](const Tensor& self, const MaybeScalar& low, const MaybeScalar& high,
                        Out& out) { out.convert(at::clamp(self, low, high)); });

OPERATOR(aclnnClampMin, [](const Tensor& self, const Scalar& low, Out& out) {
  out.convert(at::clamp_min(self, low));
});

OPERATOR(aclnnClampMax, [](const Tensor& self, const Scalar& high, Out& out) {
  out.convert(at::clamp_max(self, high));
});

OPERATOR(aclnnInplaceClampMax, [](Out& self, const Scalar& high) {
  self.convert(at::clamp_max(self.tensor(), high));
});

OPERATOR(aclnnClampTensor, [](const Tensor& self, const MaybeTensor& low, const MaybeTensor& high,
                              Out& out) { out.convert(at::clamp(self, low, high)); });

OPERATOR(aclnnClampMinTensor, [](const Tensor& self, const Tensor& low, Out& out) {
  out.convert(at::clamp_min(self, low));
});

OPERATOR(aclnnClampMaxTensor, [](const Tensor& self, const Tensor& high, Out& out) {
  out.convert(at::clamp_max(self, high));
});

OPERATOR(aclnnInplaceClampMinTensor, [](Out& self, const Tensor& low) {
  self.convert(at::clamp_min(self.tensor(), low));
});

OPERATOR(aclnnInplaceClampMaxTensor, [](Out& self, const Tensor& high) {
  self.convert(at::clamp_max(self.tensor(), high));
});

OPERATOR(aclnnThreshold, [](const Tensor& self, const Scalar& threshold, const Scalar& value,
                            Out& out) { out.convert(at::threshold(self, threshold, value)); });

OPERATOR(aclnnInplaceMaskedFillScalar, [](Out& self, const Tensor& mask, const Scalar& value) {
  self = at::masked_fill(self.tensor(), mask, value);
});

OPERATOR(aclnnInplaceMaskedFillTensor, [](Out& self, const Tensor& mask, const Tensor& value) {
  self = at::masked_fill(self.tensor(), mask, value.reshape({}));
});
