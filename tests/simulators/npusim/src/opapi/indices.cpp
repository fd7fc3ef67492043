#include "indices.h"

namespace npusim {

at::Tensor wide(const at::Tensor& index) {
  return index.scalar_type() == at::kInt ? index.to(at::kLong) : index;
}

c10::List<std::optional<at::Tensor>> places(const std::vector<at::Tensor>& indices) {
  c10::List<std::optional<at::Tensor>> found;
  for (const at::Tensor& index : indices) {
    const bool everything = index.dim() == 1 && index.numel() == 0;
    found.push_back(everything ? std::nullopt : std::optional<at::Tensor>(index));
  }
  return found;
}

}  // namespace npusim
