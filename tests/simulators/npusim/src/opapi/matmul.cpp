// Matrix products. The last argument says how the device may shorten float32; the simulator never
// does.
#include "operator.h"

using namespace npusim;

OPERATOR(aclnnMatmul, [](const Tensor& self, const Tensor& other, Out& out, int8_t) {
  out.convert(at::matmul(self, other));
});

OPERATOR(aclnnMm, [](const Tensor& self, const Tensor& other, Out& out, int8_t) {
  out.convert(at::mm(self, other));
});

OPERATOR(aclnnBatchMatMul, [](const Tensor& self, const Tensor& other, Out& out, int8_t) {
  out.convert(at::bmm(self, other));
});

OPERATOR(aclnnMv, [](const Tensor& self, const Tensor& vector, Out& out, int8_t) {
  out.convert(at::mv(self, vector));
});

OPERATOR(aclnnDot, [](const Tensor& self, const Tensor& other, Out& out) {
  out.convert(at::dot(self, other));
});

OPERATOR(aclnnAddmm, [](const Tensor& self, const Tensor& left, const Tensor& right,
                        const Scalar& beta, const Scalar& alpha, Out& out, int8_t) {
  out.convert(at::addmm(self, left, right, beta, alpha));
});

OPERATOR(aclnnInplaceAddmm, [](Out& self, const Tensor& left, const Tensor& right,
                               const Scalar& beta, const Scalar& alpha, int8_t) {
  self.convert(at::addmm(self.tensor(), left, right, beta, alpha));
});

OPERATOR(aclnnBaddbmm, [](const Tensor& self, const Tensor& left, const Tensor& right,
                          const Scalar& beta, const Scalar& alpha, Out& out, int8_t) {
  out.convert(at::baddbmm(self, left, right, beta, alpha));
});

OPERATOR(aclnnAddmv, [](const Tensor& self, const Tensor& matrix, const Tensor& vector,
                        const Scalar& alpha, const Scalar& beta, Out& out, int8_t) {
  out.convert(at::addmv(self, matrix, vector, beta, alpha));
});
