// Bits and truth values.
#include "operator.h"

using namespace npusim;

#define BITWISE(name, function)                                                                \
  OPERATOR(aclnnBitwise##name##Tensor, [](const Tensor& self, const Tensor& other, Out& out) { \
    out.convert(function(self, other));                                                        \
  });                                                                                          \
  OPERATOR(aclnnBitwise##name##Scalar, [](const Tensor& self, const Scalar& other, Out& out) { \
    out.convert(function(self, other));                                                        \
  })
#define BITWISE_IN_PLACE(name, function)                                                       \
  OPERATOR(aclnnInplaceBitwise##name##Tensor, [](Out& self, const Tensor& other) {             \
    self.convert(function(self.tensor(), other));                                              \
  });                                                                                          \
  OPERATOR(aclnnInplaceBitwise##name##Scalar, [](Out& self, const Scalar& other) {             \
    self.convert(function(self.tensor(), other));                                              \
  })

#define LOGICAL(name, function)                                                         \
  OPERATOR(aclnn##name, [](const Tensor& self, const Tensor& other, Out& out) {         \
    out.convert(function(self, other));                                                 \
  })
#define LOGICAL_IN_PLACE(name, function)                                                \
  OPERATOR(aclnnInplace##name, [](Out& self, const Tensor& other) {                     \
    self.cast(function(self.tensor(), other));                                          \
  })

BITWISE(And, at::bitwise_and);
BITWISE(Or, at::bitwise_or);
BITWISE(Xor, at::bitwise_xor);
BITWISE_IN_PLACE(And, at::bitwise_and);
BITWISE_IN_PLACE(Xor, at::bitwise_xor);
LOGICAL(LogicalAnd, at::logical_and);
LOGICAL(LogicalOr, at::logical_or);
LOGICAL(LogicalXor, at::logical_xor);
LOGICAL_IN_PLACE(LogicalAnd, at::logical_and);
LOGICAL_IN_PLACE(LogicalOr, at::logical_or);

OPERATOR(aclnnLeftShift, [](const Tensor& self, const Tensor& bits, Out& out) {
  out.convert(at::bitwise_left_shift(self, bits));
});

OPERATOR(aclnnLeftShifts, [](const Tensor& self, const Scalar& bits, Out& out) {
  out.convert(at::bitwise_left_shift(self, bits));
});

OPERATOR(aclnnRightShift, [](const Tensor& self, const Tensor& bits, Out& out) {
  out.convert(at::bitwise_right_shift(self, bits));
});
