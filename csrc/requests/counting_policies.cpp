// Policies that count requests or tokens, and bind at once.
#include <algorithm>
#include <utility>

#include "common/random.h"
#include "requests/immediate_policy.h"

namespace equipoise::requests {
namespace {

class RandomPolicy final : public ImmediatePolicy {
 public:
    explicit RandomPolicy(const PolicySettings& settings)
        : ImmediatePolicy(settings), rng_(settings.seed) {}

 private:
    // The first that accepts, from a random start on: uniform if all accept.
    std::int32_t choose(const RouterState& state, const Request& request) override {
        return least_scored(state, request, rng_.below(state.size()),
                            [](const Worker&) { return 0; });
    }
    CounterRng rng_;
};

class RoundRobinPolicy final : public ImmediatePolicy {
 public:
    using ImmediatePolicy::ImmediatePolicy;

 private:
    std::int32_t choose(const RouterState& state, const Request& request) override {
        return least_scored(state, request, next_, [](const Worker&) { return 0; });
    }
    void after_bind(RouterState& state, std::int32_t worker) override {
        next_ = (static_cast<std::size_t>(worker) + 1) % state.size();
    }
    std::size_t next_ = 0;
};

// Mitzenmacher, "The power of two choices in randomized load balancing", 2001.
class PowerOfTwoPolicy final : public ImmediatePolicy {
 public:
    explicit PowerOfTwoPolicy(const PolicySettings& settings)
        : ImmediatePolicy(settings), rng_(settings.seed) {}

 private:
    std::int32_t choose(const RouterState& state, const Request& request) override {
        std::int32_t able = 0, first = -1, second = -1;
        // Draws two of those that accept, without replacement, in one pass each.
        for (std::size_t w = 0; w < state.size(); ++w)
            able += accepts(state.worker(w), state, request);
        if (able == 0) return -1;
        first = pick(state, request, rng_.below(able), -1);
        if (able > 1) second = pick(state, request, rng_.below(able - 1), first);
        if (second < 0) return first;
        const bool fewer = state.worker(second).all_count() < state.worker(first).all_count();
        return fewer ? second : first;
    }

    std::int32_t pick(const RouterState& state, const Request& request, std::size_t skip,
                      std::int32_t but) const {
        for (std::size_t w = 0;; ++w)
            if (static_cast<std::int32_t>(w) != but && accepts(state.worker(w), state, request) &&
                skip-- == 0)
                return static_cast<std::int32_t>(w);
    }
    CounterRng rng_;
};

// Join the shortest queue: by requests, or by tokens (`jsq_load` of DP-BalanceRouter).
class ShortestQueuePolicy final : public ImmediatePolicy {
 public:
    using Measure = std::int64_t (Worker::*)() const;

    ShortestQueuePolicy(const PolicySettings& settings, Measure measure)
        : ImmediatePolicy(settings), measure_(measure) {}

 private:
    std::int32_t choose(const RouterState& state, const Request& request) override {
        return least_scored(state, request, 0, [this](const Worker& w) { return (w.*measure_)(); });
    }
    Measure measure_;
};

// vLLM's internal balancer until the middle of 2026: 4 * waiting + running of the last report. A
// pick counts as one waiting request per front end, as if all picked alike, until the next report
// overwrites it. Front ends begin to look at different workers, so that ties do not go to the same
// one.
class VllmLegacyPolicy final : public ImmediatePolicy {
 public:
    VllmLegacyPolicy(const PolicySettings& settings, std::size_t workers)
        : ImmediatePolicy(settings),
          front_ends_(settings.front_ends),
          start_(workers * static_cast<std::size_t>(settings.front_end) /
                 static_cast<std::size_t>(settings.front_ends)) {}

 private:
    std::int32_t choose(const RouterState& state, const Request& request) override {
        return least_scored(state, request, start_, [](const Worker& w) {
            return 4 * w.report.waiting + w.report.running;
        });
    }
    void after_bind(RouterState& state, std::int32_t worker) override {
        state.worker_at(worker).report.waiting += front_ends_;
    }
    std::int64_t front_ends_;
    std::size_t start_;
};

// vLLM since PR 49204, with the rotation of PR 47420: ties go to the next worker after each pick.
class VllmPolicy final : public ImmediatePolicy {
 public:
    VllmPolicy(const PolicySettings& settings, std::size_t workers)
        : ImmediatePolicy(settings),
          front_ends_(settings.front_ends),
          start_(workers * static_cast<std::size_t>(settings.front_end) /
                 static_cast<std::size_t>(settings.front_ends)) {}

 private:
    std::int32_t choose(const RouterState& state, const Request& request) override {
        return least_scored(state, request, start_, [this](const Worker& w) {
            const WorkerReport& report = w.report;
            const std::int64_t requests =
                std::max(front_ends_ * w.count, report.waiting + report.running);
            // Waiting requests count more as the KV cache fills beyond a half: 6 and 0.5 are
            // vLLM's.
            const double pressure = std::max(0.0, report.kv_usage - 0.5);
            return static_cast<double>(requests) +
                   static_cast<double>(report.waiting) * 6 * pressure;
        });
    }
    void after_bind(RouterState& state, std::int32_t worker) override {
        state.worker_at(worker).report.waiting += front_ends_;
        start_ = (start_ + 1) % state.size();
    }
    std::int64_t front_ends_;
    std::size_t start_;
};

// SGLang's `total_tokens` of DP attention: (tokens, requests) of the last report, plus own picks
// since.
class SglangTokensPolicy final : public ImmediatePolicy {
 public:
    using ImmediatePolicy::ImmediatePolicy;

 private:
    std::int32_t choose(const RouterState& state, const Request& request) override {
        size_ = request.size;
        return least_scored(state, request, 0, [](const Worker& w) {
            return std::pair(w.report.tokens, w.report.waiting + w.report.running);
        });
    }
    void after_bind(RouterState& state, std::int32_t worker) override {
        WorkerReport& report = state.worker_at(worker).report;
        report.tokens += size_;
        ++report.waiting;
    }
    std::int64_t size_ = 0;
};

}  // namespace

std::unique_ptr<Policy> make_counting_policy(const PolicySettings& settings, std::size_t workers) {
    const std::string& name = settings.name;
    if (name == "random") return std::make_unique<RandomPolicy>(settings);
    if (name == "round_robin") return std::make_unique<RoundRobinPolicy>(settings);
    if (name == "power_of_two") return std::make_unique<PowerOfTwoPolicy>(settings);
    if (name == "jsq") return std::make_unique<ShortestQueuePolicy>(settings, &Worker::all_count);
    if (name == "jsq_load")
        return std::make_unique<ShortestQueuePolicy>(settings, &Worker::all_load);
    if (name == "vllm_legacy") return std::make_unique<VllmLegacyPolicy>(settings, workers);
    if (name == "vllm") return std::make_unique<VllmPolicy>(settings, workers);
    if (name == "sglang_tokens") return std::make_unique<SglangTokensPolicy>(settings);
    return nullptr;
}

}  // namespace equipoise::requests
