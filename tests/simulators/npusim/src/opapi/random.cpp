// Random numbers: a function of the seed and the offset that the program passes, and not those of
// any real device.
#include <ATen/CPUGeneratorImpl.h>

#include "operator.h"

using namespace npusim;

namespace {

at::Generator generator(int64_t seed, int64_t offset) {
  const auto mixed = static_cast<uint64_t>(seed) * 0x9E3779B97F4A7C15ull;
  return at::detail::createCPUGenerator(mixed ^ static_cast<uint64_t>(offset));
}

Tensor like(const Out& out) { return at::empty_like(out.tensor(), at::MemoryFormat::Contiguous); }

}  // namespace

OPERATOR(aclnnInplaceUniform, [](Out& self, double from, double to, int64_t seed, int64_t offset) {
  self = like(self).uniform_(from, to, generator(seed, offset));
});

OPERATOR(aclnnInplaceNormal, [](Out& self, float mean, float deviation, int64_t seed,
                                int64_t offset) {
  self = like(self).normal_(mean, deviation, generator(seed, offset));
});

OPERATOR(aclnnNormalFloatFloat, [](float mean, float deviation, int64_t seed, int64_t offset,
                                   Out& out) {
  out = like(out).normal_(mean, deviation, generator(seed, offset));
});

OPERATOR(aclnnInplaceRandom, [](Out& self, int64_t from, int64_t to, int64_t seed,
                                int64_t offset) {
  self = like(self).random_(from, to, generator(seed, offset));
});

OPERATOR(aclnnInplaceBernoulli, [](Out& self, const Scalar& chance, int64_t seed, int64_t offset) {
  self = like(self).bernoulli_(chance.toDouble(), generator(seed, offset));
});

OPERATOR(aclnnInplaceBernoulliTensor, [](Out& self, const Tensor& chances, int64_t seed,
                                         int64_t offset) {
  self = like(self).bernoulli_(chances, generator(seed, offset));
});

OPERATOR(aclnnRandperm, [](int64_t count, int64_t seed, int64_t offset, Out& out) {
  out = at::randperm(count, generator(seed, offset), out.tensor().options());
});

OPERATOR(aclnnMultinomial, [](const Tensor& weights, int64_t count, bool replace, int64_t seed,
                              int64_t offset, Out& out) {
  out = at::multinomial(weights, count, replace, generator(seed, offset));
});
