// Policies of other routers that look at how much of a prompt a worker has cached, and bind at
// once.
#include <algorithm>
#include <utility>

#include "requests/immediate_policy.h"

namespace equipoise::requests {
namespace {

// Gives scores the number of the worker too, which cached tokens are listed by. Ties go to the
// lower number.
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

// NVIDIA Dynamo's KV router at temperature 0, with its default weights of 1: prompt tokens that the
// worker would have to compute, those of requests before it too, plus tokens in its KV cache.
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

// DPScheduler of tpu-inference (pull request 3315): least prompt tokens to compute, then fewest
// requests. Its third measure, the shortest remaining output, is known to engines only.
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

// The endpoint picker of llm-d, with the weights of its sample for precise prefixes: twice the part
// of the prompt that is cached, plus the part of the KV cache that is free, plus how short the
// queue is between the longest and the shortest.
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

// `cache_aware` of SGLang's gateway, with its thresholds: if requests are far apart (64, and 1.5
// times), the worker with the fewest; else, if one has more than 0.3 of the prompt cached, the one
// with the most; else the one that has cached least so far. The gateway keeps a prefix tree; here
// callers say what is cached.
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
        // In integers: 1.5 as 3 / 2, and 0.3 as 3 / 10.
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

    std::vector<std::int64_t>
        uncached_tokens_;             // by worker: tokens that it was given and had not cached
    std::vector<std::int64_t> hits_;  // by worker: cached tokens of the present request
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
