// One tensor, element by element.
#include "operator.h"

using namespace npusim;

#define UNARY(name, function) \
  OPERATOR(aclnn##name, [](const Tensor& self, Out& out) { out.convert(function(self)); })
#define UNARY_IN_PLACE(name, function) \
  OPERATOR(aclnnInplace##name, [](Out& self) { self.convert(function(self.tensor())); })
#define UNARY_BOTH(name, function) \
  UNARY(name, function);           \
  UNARY_IN_PLACE(name, function)

UNARY(Abs, at::abs);
UNARY(Neg, at::neg);
UNARY(Sign, at::sign);
UNARY(Signbit, at::signbit);
UNARY(Round, at::round);
UNARY(Trunc, at::trunc);
UNARY(BitwiseNot, at::bitwise_not);
UNARY(IsFinite, at::isfinite);
UNARY(IsPosInf, at::isposinf);
UNARY(IsNegInf, at::isneginf);
UNARY_BOTH(Ceil, at::ceil);
UNARY_BOTH(Floor, at::floor);
UNARY_BOTH(Frac, at::frac);
UNARY_BOTH(Exp, at::exp);
UNARY_BOTH(Exp2, at::exp2);
UNARY_BOTH(Expm1, at::expm1);
UNARY_BOTH(Log, at::log);
UNARY_BOTH(Log2, at::log2);
UNARY_BOTH(Log10, at::log10);
UNARY_BOTH(Log1p, at::log1p);
UNARY_BOTH(Sqrt, at::sqrt);
UNARY_BOTH(Rsqrt, at::rsqrt);
UNARY_BOTH(Reciprocal, at::reciprocal);
UNARY_BOTH(Sin, at::sin);
UNARY_BOTH(Cos, at::cos);
UNARY_BOTH(Tan, at::tan);
UNARY_BOTH(Asin, at::asin);
UNARY_BOTH(Acos, at::acos);
UNARY_BOTH(Atan, at::atan);
UNARY_BOTH(Sinh, at::sinh);
UNARY_BOTH(Cosh, at::cosh);
UNARY_BOTH(Tanh, at::tanh);
UNARY_BOTH(Erf, at::erf);
UNARY_BOTH(Erfc, at::erfc);
UNARY_BOTH(Sigmoid, at::sigmoid);
UNARY_BOTH(Relu, at::relu);
UNARY_BOTH(LogicalNot, at::logical_not);
UNARY_BOTH(Mish, at::mish);
UNARY_BOTH(Hardswish, at::hardswish);
UNARY_BOTH(Hardsigmoid, at::hardsigmoid);
UNARY(Silu, at::silu);
UNARY(LogSigmoid, at::log_sigmoid);

// The buffer is for the way back.
OPERATOR(aclnnLogSigmoidForward, [](const Tensor& self, Out& out, Out&) {
  out = at::log_sigmoid(self);
});

// The first version of it knows the approximation alone, whatever torch asks for.
OPERATOR(aclnnGelu, [](const Tensor& self, Out& out) { out = at::gelu(self, "tanh"); });

OPERATOR(aclnnGeluV2, [](const Tensor& self, int64_t approximate, Out& out) {
  out = at::gelu(self, approximate == 0 ? "none" : "tanh");
});

OPERATOR(aclnnSoftplus, [](const Tensor& self, const Scalar& beta, const Scalar& threshold,
                           Out& out) { out.convert(at::softplus(self, beta, threshold)); });

OPERATOR(aclnnLeakyRelu, [](const Tensor& self, const Scalar& slope, Out& out) {
  out.convert(at::leaky_relu(self, slope));
});

OPERATOR(aclnnNanToNum, [](const Tensor& self, float nan, float above, float below, Out& out) {
  out.convert(at::nan_to_num(self, nan, above, below));
});
