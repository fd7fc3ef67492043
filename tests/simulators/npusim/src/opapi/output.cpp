#include "output.h"

#include <sstream>

#include "errors.h"
#include "fault.h"

namespace npusim {
namespace {

constexpr int64_t kTorn = 64;  // bytes; shorter results are written at once

std::string shown(const at::Tensor& tensor) {
  std::ostringstream out;
  out << tensor.sizes() << ' ' << tensor.scalar_type();
  return out.str();
}

// Sets where `tensor` can be parted; false when it has one element.
bool partible(const at::Tensor& tensor, int64_t& dimension) {
  for (dimension = 0; dimension < tensor.dim(); ++dimension) {
    if (tensor.size(dimension) > 1) return true;
  }
  return false;
}

}  // namespace

void Writing::copy(const at::Tensor& target, const at::Tensor& value) {
  int64_t along = 0;
  if (static_cast<int64_t>(target.nbytes()) < kTorn || !partible(target, along)) {
    return step([=] { target.copy_(value); });
  }
  const int64_t size = target.size(along);
  const int64_t half = size / 2;
  step([=] { target.narrow(along, 0, half).copy_(value.narrow(along, 0, half)); });
  step([=] {
    target.narrow(along, half, size - half).copy_(value.narrow(along, half, size - half));
  });
}

void Out::refuse(const at::Tensor& value, const char* why) const {
  const std::string wrong = text("%s makes %s, its result is to be %s: %s", writing_->operation(),
                                 shown(value).c_str(), shown(target_).c_str(), why);
  fault(wrong);
  throw Failure(kInvalidParam, wrong);
}

void Out::check_shape(const at::Tensor& value) const {
  if (value.sizes() != target_.sizes()) refuse(value, "another shape");
}

void Out::operator=(const at::Tensor& value) {
  if (value.scalar_type() != target_.scalar_type()) refuse(value, "another element type");
  cast(value);
}

void Out::convert(const at::Tensor& value) {
  if (!at::canCast(value.scalar_type(), target_.scalar_type())) {
    refuse(value, "an element type that it is not promoted to");
  }
  cast(value);
}

void Out::cast(const at::Tensor& value) {
  check_shape(value);
  writing_->copy(target_, value);
}

void Out::shorten(const at::Tensor& value) {
  if (value.scalar_type() != target_.scalar_type()) refuse(value, "another element type");
  if (value.numel() > target_.numel() || !target_.is_contiguous()) refuse(value, "no room");
  *described_.reported = value.sizes().vec();
  writing_->copy(target_.flatten().narrow(0, 0, value.numel()), value.flatten());
}

}  // namespace npusim
