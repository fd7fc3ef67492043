// New contents: constants, ranges, copies.
#include "operator.h"

using namespace npusim;

namespace {

// One element, everywhere.
Tensor everywhere(const Tensor& one, const Out& out) {
  return one.reshape({}).expand(out.tensor().sizes());
}

Tensor one(const Scalar& value, const Out& out) {
  return at::scalar_tensor(value, out.tensor().options());
}

}  // namespace

OPERATOR(aclnnInplaceZero, [](Out& self) { self = everywhere(one(0, self), self); });
OPERATOR(aclnnInplaceOne, [](Out& self) { self = everywhere(one(1, self), self); });

OPERATOR(aclnnInplaceFillScalar, [](Out& self, const Scalar& value) {
  self = everywhere(one(value, self), self);
});

OPERATOR(aclnnInplaceFillTensor, [](Out& self, const Tensor& value) {
  self.cast(everywhere(value, self));
});

OPERATOR(aclnnInplaceCopy, [](Out& self, const Tensor& source) {
  self.cast(source.expand(self.tensor().sizes()));
});

OPERATOR(aclnnCast, [](const Tensor& self, at::ScalarType type, Out& out) { out = self.to(type); });

OPERATOR(aclnnArange, [](const Scalar& start, const Scalar& end, const Scalar& step, Out& out) {
  out = at::arange(start, end, step, out.tensor().options());
});

OPERATOR(aclnnRange, [](const Scalar& start, const Scalar& end, const Scalar& step, Out& out) {
  out = at::range(start, end, step, out.tensor().options());
});

OPERATOR(aclnnLinspace, [](const Scalar& start, const Scalar& end, int64_t steps, Out& out) {
  out = at::linspace(start, end, steps, out.tensor().options());
});

OPERATOR(aclnnEye, [](int64_t rows, int64_t columns, Out& out) {
  out = at::eye(rows, columns, out.tensor().options());
});

OPERATOR(aclnnTril, [](const Tensor& self, int64_t diagonal, Out& out) {
  out = at::tril(self, diagonal);
});

OPERATOR(aclnnTriu, [](const Tensor& self, int64_t diagonal, Out& out) {
  out = at::triu(self, diagonal);
});

OPERATOR(aclnnInplaceTril, [](Out& self, int64_t diagonal) {
  self = at::tril(self.tensor(), diagonal);
});

OPERATOR(aclnnInplaceTriu, [](Out& self, int64_t diagonal) {
  self = at::triu(self.tensor(), diagonal);
});
