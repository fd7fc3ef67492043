// Policies of peers that look at what is cached of a prompt, and bind at once.
#include <algorithm>
#include <utility>

#include "requests/immediate_policy.h"

namespace equipoise::requests {
namespace {

// A score of a worker for a request; the first of equals has it.
class PrefixAwarePolicy : public ImmediatePolicy {
 public:
    using ImmediatePolicy::ImmediatePolicy;

 protected:
    template <typename Score>
    std::int32_t best_worker(const RouterState& state, const Request& request, Score score) const {
        const Worker* const first = &state.worker(0);
        return least_scored(state, request, 0, [&](const Worker& worker) {
            return score(worker, static_cast<std::int32_t>(&worker - first));
        });
    }
};

// NVIDIA Dynamo's KV router, temperature 0, its default weights of 1: prompt tokens that the worker
// will have to compute, and tokens in its cache, of it and of what it has.
class DynamoPolicy final : public PrefixAwarePolicy {
 public:
    using PrefixAwarePolicy::PrefixAwarePolicy;

 private:
    std::int32_t choose(const RouterState& state, const Request& request) override {
        return best_worker(state, request, [&](const Worker& worker, std::int32_t w) {
            return worker.all_pending() + request.size - request.cached(w) + worker.all_load();
        });
    }
};

// DPScheduler of tpu-inference (pull request 3315): the least of what is to be computed there then,
// of requests in flight. Its third measure, the shortest remaining output, is known to engines
// only.
class TpuInferencePolicy final : public PrefixAwarePolicy {
 public:
    using PrefixAwarePolicy::PrefixAwarePolicy;

 private:
    std::int32_t choose(const RouterState& state, const Request& request) override {
        return best_worker(state, request, [&](const Worker& worker, std::int32_t w) {
            return std::pair(worker.all_pending() + request.size - request.cached(w),
                             worker.all_count());
        });
    }
};

// The endpoint picker of llm-d, its sample for precise prefixes: twice the part that is cached, the
// part of the KV cache that is free, and where the queue lies between the longest and the shortest.
class LlmDPolicy final : public PrefixAwarePolicy {
 public:
    using PrefixAwarePolicy::PrefixAwarePolicy;

 private:
    std::int32_t choose(const RouterState& state, const Request& request) override {
        std::int64_t longest = 0, shortest = kUnlimited;
        for (std::size_t w = 0; w < state.size(); ++w) {
            if (!accepts(state.worker(w), state, request)) continue;
            longest = std::max(longest, state.worker(w).report.waiting);
            shortest = std::min(shortest, state.worker(w).report.waiting);
        }
        return best_worker(state, request, [&](const Worker& worker, std::int32_t w) {
            const double hit = part(request.cached(w), request.size);
            const double queue =
                longest == shortest ? 1 : part(longest - worker.report.waiting, longest - shortest);
            return -(2 * hit + (1 - worker.report.kv_usage) + queue);
        });
    }
    void after_bind(RouterState& state, std::int32_t worker) override {
        ++state.worker_at(worker).report.waiting;
    }
    static double part(std::int64_t some, std::int64_t all) {
        return static_cast<double>(some) / static_cast<double>(all);
    }
};

// `cache_aware` of SGLang's gateway, its thresholds 0.3, 64 and 1.5: fewest requests where they are
// far apart, else who has most of the prompt, else who has cached least. What is cached is told
// here, where the gateway has a tree of its own.
class SglangCachePolicy final : public PrefixAwarePolicy {
 public:
    SglangCachePolicy(const PolicySettings& settings, std::size_t workers)
        : PrefixAwarePolicy(settings), uncached_tokens_(workers) {}

 private:
    std::int32_t choose(const RouterState& state, const Request& request) override {
        uncached_tokens_.resize(state.size());
        size_ = request.size;
        hits_.assign(state.size(), 0);
        std::int64_t most = 0, fewest = kUnlimited, longest = 0;
        for (std::size_t w = 0; w < state.size(); ++w) {
            hits_[w] = request.cached(static_cast<std::int32_t>(w));
            if (!accepts(state.worker(w), state, request)) continue;
            most = std::max(most, state.worker(w).all_count());
            fewest = std::min(fewest, state.worker(w).all_count());
            longest = std::max(longest, hits_[w]);
        }
        const bool apart = most - fewest > 64 && 2 * most > 3 * fewest;
        const bool known = 10 * longest > 3 * request.size;
        return best_worker(state, request, [&](const Worker& worker, std::int32_t w) {
            if (apart) return worker.all_count();
            return known ? -hits_[w] : uncached_tokens_[w];
        });
    }
    void after_bind(RouterState&, std::int32_t worker) override {
        uncached_tokens_[worker] += size_ - hits_[worker];
    }

    std::vector<std::int64_t> uncached_tokens_;  // tokens that each was given and did not have
    std::vector<std::int64_t> hits_;             // of the request that is looked at
    std::int64_t size_ = 0;
};

}  // namespace

std::unique_ptr<Policy> make_prefix_aware_policy(const PolicySettings& settings,
                                                 std::size_t workers) {
    const std::string& name = settings.name;
    if (name == "dynamo") return std::make_unique<DynamoPolicy>(settings);
    if (name == "llm_d") return std::make_unique<LlmDPolicy>(settings);
    if (name == "sglang_cache") return std::make_unique<SglangCachePolicy>(settings, workers);
    if (name == "tpu_inference") return std::make_unique<TpuInferencePolicy>(settings);
    return nullptr;
}

}  // namespace equipoise::requests
