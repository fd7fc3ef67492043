// Sums, products, quotients and powers. As CANN documents it, the result of the promoted types must
// be convertible to the given one.
#include "operator.h"

using namespace npusim;

namespace {

// How CANN numbers what happens to the fraction of a quotient.
std::optional<c10::string_view> rounding(int mode) {
  if (mode == 0) return std::nullopt;
  return mode == 1 ? "trunc" : "floor";
}

// The second operand of an operation on a tensor and a scalar, which takes part in the promotion of
// types as a number does.
Tensor wrapped(const Scalar& number) {
  Tensor tensor = at::scalar_tensor(number, at::TensorOptions(number.type()));
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

}  // namespace

// Four spellings of one function: of two tensors or a tensor and a scalar, anew or in place.
#define BINARY(tensor_name, scalar_name, function)                                             \
  OPERATOR(aclnn##tensor_name, [](const Tensor& self, const Tensor& other, Out& out) {         \
    out.convert(function(self, other));                                                        \
  });                                                                                          \
  OPERATOR(aclnn##scalar_name, [](const Tensor& self, const Scalar& other, Out& out) {         \
    out.convert(function(self, wrapped(other)));                                               \
  });                                                                                          \
  OPERATOR(aclnnInplace##tensor_name, [](Out& self, const Tensor& other) {                     \
    self.convert(function(self.tensor(), other));                                              \
  });                                                                                          \
  OPERATOR(aclnnInplace##scalar_name, [](Out& self, const Scalar& other) {                     \
    self.convert(function(self.tensor(), wrapped(other)));                                     \
  })

#define SCALED(tensor_name, scalar_name, function)                                             \
  OPERATOR(aclnn##tensor_name, [](const Tensor& self, const Tensor& other, const Scalar& alpha, \
                                  Out& out) { out.convert(function(self, other, alpha)); });   \
  OPERATOR(aclnn##scalar_name, [](const Tensor& self, const Scalar& other, const Scalar& alpha, \
                                  Out& out) {                                                  \
    out.convert(function(self, wrapped(other), alpha));                                        \
  })

#define SCALED_IN_PLACE(tensor_name, scalar_name, function)                                     \
  OPERATOR(aclnnInplace##tensor_name, [](Out& self, const Tensor& other, const Scalar& alpha) { \
    self.convert(function(self.tensor(), other, alpha));                                        \
  });                                                                                           \
  OPERATOR(aclnnInplace##scalar_name, [](Out& self, const Scalar& other, const Scalar& alpha) { \
    self.convert(function(self.tensor(), wrapped(other), alpha));                               \
  })

BINARY(Mul, Muls, at::mul);
BINARY(Div, Divs, at::div);
BINARY(FloorDivide, FloorDivides, at::floor_divide);
BINARY(FmodTensor, FmodScalar, at::fmod);
BINARY(RemainderTensorTensor, RemainderTensorScalar, at::remainder);
SCALED(Add, Adds, at::add);
SCALED(Sub, Subs, at::sub);
SCALED(Rsub, Rsubs, at::rsub);
SCALED_IN_PLACE(Add, Adds, at::add);
SCALED_IN_PLACE(Sub, Subs, at::sub);

OPERATOR(aclnnDivMod, [](const Tensor& self, const Tensor& other, int mode, Out& out) {
  out.convert(at::div(self, other, rounding(mode)));
});

OPERATOR(aclnnDivMods, [](const Tensor& self, const Scalar& other, int mode, Out& out) {
  out.convert(at::div(self, wrapped(other), rounding(mode)));
});

OPERATOR(aclnnInplaceDivMod, [](Out& self, const Tensor& other, int mode) {
  self.convert(at::div(self.tensor(), other, rounding(mode)));
});

OPERATOR(aclnnInplaceDivMods, [](Out& self, const Scalar& other, int mode) {
  self.convert(at::div(self.tensor(), wrapped(other), rounding(mode)));
});

OPERATOR(aclnnRemainderScalarTensor, [](const Scalar& self, const Tensor& other, Out& out) {
  out.convert(at::remainder(wrapped(self), other));
});

OPERATOR(aclnnPowTensorTensor, [](const Tensor& self, const Tensor& exponent, Out& out) {
  out.convert(at::pow(self, exponent));
});

OPERATOR(aclnnPowTensorScalar, [](const Tensor& self, const Scalar& exponent, Out& out) {
  out.convert(at::pow(self, exponent));
});

OPERATOR(aclnnInplacePowTensorTensor, [](Out& self, const Tensor& exponent) {
  self.convert(at::pow(self.tensor(), exponent));
});

OPERATOR(aclnnInplacePowTensorScalar, [](Out& self, const Scalar& exponent) {
  self.convert(at::pow(self.tensor(), exponent));
});

OPERATOR(aclnnPowScalarTensor, [](const Scalar& self, const Tensor& exponent, Out& out) {
  out.convert(at::pow(self, exponent));
});

OPERATOR(aclnnAtan2, [](const Tensor& self, const Tensor& other, Out& out) {
  out.convert(at::atan2(self, other));
});

OPERATOR(aclnnAddcmul, [](const Tensor& self, const Tensor& one, const Tensor& two,
                          const Scalar& value, Out& out) {
  out.convert(at::addcmul(self, one, two, value));
});

OPERATOR(aclnnInplaceAddcmul, [](Out& self, const Tensor& one, const Tensor& two,
                                 const Scalar& value) {
  self.convert(at::addcmul(self.tensor(), one, two, value));
});

OPERATOR(aclnnAddcdiv, [](const Tensor& self, const Tensor& one, const Tensor& two,
                          const Scalar& value, Out& out) {
  out.convert(at::addcdiv(self, one, two, value));
});

OPERATOR(aclnnInplaceAddcdiv, [](Out& self, const Tensor& one, const Tensor& two,
                                 const Scalar& value) {
  self.convert(at::addcdiv(self.tensor(), one, two, value));
});

OPERATOR(aclnnLerp, [](const Tensor& self, const Tensor& end, const Tensor& weight, Out& out) {
  out.convert(at::lerp(self, end, weight));
});

OPERATOR(aclnnLerps, [](const Tensor& self, const Tensor& end, const Scalar& weight, Out& out) {
  out.convert(at::lerp(self, end, weight));
});

OPERATOR(aclnnInplaceLerp, [](Out& self, const Tensor& end, const Tensor& weight) {
  self.convert(at::lerp(self.tensor(), end, weight));
});

OPERATOR(aclnnInplaceLerps, [](Out& self, const Tensor& end, const Scalar& weight) {
  self.convert(at::lerp(self.tensor(), end, weight));
});
