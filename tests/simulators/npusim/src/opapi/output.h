// Where an operator's result goes.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "objects.h"

namespace npusim {

using Step = std::function<void()>;

// What is left to be done to the memory: a long result is written in two steps, so that whoever is
// not ordered behind the operator sees half of it.
class Writing {
 public:
  explicit Writing(std::string operation) : operation_(std::move(operation)) {}

  const char* operation() const { return operation_.c_str(); }

  // Copies `value` to `target`, which has its shape.
  void copy(const at::Tensor& target, const at::Tensor& value);
  void step(Step step) { steps_.push_back(std::move(step)); }
  std::vector<Step> take() { return std::move(steps_); }

 private:
  std::string operation_;
  std::vector<Step> steps_;
};

// One result. A value that does not fit is a fault and Failure(kInvalidParam).
class Out {
 public:
  Out(const aclTensor& tensor, Writing& writing)
      : described_(tensor), target_(view(tensor, writing.operation())), writing_(&writing) {}

  // The memory itself, for operators that change a part of it.
  const at::Tensor& tensor() const { return target_; }

  // Exactly this shape and element type.
  void operator=(const at::Tensor& value);

  // This shape; the element type as torch promotes it, so a fraction never becomes an integer.
  void convert(const at::Tensor& value);

  // This shape; any element type, for operators that are there to change it.
  void cast(const at::Tensor& value);

  // The first elements of a memory that was made for more, row-major, and the shape that they have.
  void shorten(const at::Tensor& value);

  // Changes to the memory that the value of `tensor()` alone does not say, one after the other.
  void step(Step step) { writing_->step(std::move(step)); }

 private:
  void refuse(const at::Tensor& value, const char* why) const;
  void check_shape(const at::Tensor& value) const;

  const aclTensor& described_;
  at::Tensor target_;
  Writing* writing_;
};

}  // namespace npusim
