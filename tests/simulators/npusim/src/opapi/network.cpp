// What neural networks are made of, besides products.
#include "operator.h"

using namespace npusim;

OPERATOR(aclnnSoftmax, [](const Tensor& self, int64_t dimension, Out& out) {
  out = at::softmax(self, dimension, out.tensor().scalar_type());
});

OPERATOR(aclnnLogSoftmax, [](const Tensor& self, int64_t dimension, Out& out) {
  out = at::log_softmax(self, dimension, out.tensor().scalar_type());
});

OPERATOR(aclnnGlu, [](const Tensor& self, int64_t dimension, Out& out) {
  out = at::glu(self, dimension);
});

// silu(a) * b for the halves a and b along a dimension.
OPERATOR(aclnnSwiGlu, [](const Tensor& self, int64_t dimension, Out& out) {
  const Tensors halves = at::chunk(self, 2, dimension);
  out = at::silu(halves.at(0)) * halves.at(1);
});

OPERATOR(aclnnLayerNorm, [](const Tensor& self, const Ints& shape, const MaybeTensor& weight,
                            const MaybeTensor& bias, double epsilon, Out& out,
                            std::optional<Out>& mean, std::optional<Out>& deviation) {
  const auto [normal, middle, inverse] =
      at::native_layer_norm(self, shape, weight, bias, epsilon);
  out = normal;
  if (mean) mean->cast(middle);
  if (deviation) deviation->cast(inverse);
});

// x / sqrt(mean of x * x) * gamma over the dimensions of gamma, and the reciprocal root.
OPERATOR(aclnnRmsNorm, [](const Tensor& self, const Tensor& gamma, double epsilon, Out& out,
                          Out& reciprocal) {
  Ints last;
  for (int64_t k = 1; k <= gamma.dim(); ++k) last.push_back(-k);
  const Tensor x = self.to(at::kFloat);
  const Tensor inverse = at::rsqrt(at::mean(x * x, last, true) + epsilon);
  out.cast(x * inverse * gamma.to(at::kFloat));
  reciprocal.cast(inverse.reshape(reciprocal.tensor().sizes()));
});
