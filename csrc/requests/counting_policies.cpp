// Policies that count requests or tokens, and bind at once.
#include <algorithm>
#include <utility>

#include "common/random.h"
#include "requests/immediate_policy.h"

namespace equipoise::requests {
namespace {

class Random final : public Push {
 public:
    explicit Random(const PolicySettings& settings) : Push(settings), dice_(settings.seed) {}

 private:
    // From a random start on the first that takes it: uniform where all do.
    std::int32_t choose(const Fleet& fleet, const Request& request) override {
        return least(fleet, request, dice_.below(fleet.size()), [](const Worker&) { return 0; });
    }
    Dice dice_;
};

class RoundRobin final : public Push {
 public:
    using Push::Push;

 private:
    std::int32_t choose(const Fleet& fleet, const Request& request) override {
        return least(fleet, request, next_, [](const Worker&) { return 0; });
    }
    void picked(Fleet& fleet, std::int32_t worker) override {
        next_ = (static_cast<std::size_t>(worker) + 1) % fleet.size();
    }
    std::size_t next_ = 0;
};

// Mitzenmacher, "The power of two choices in randomized load balancing", 2001.
class PowerOfTwo final : public Push {
 public:
    explicit PowerOfTwo(const PolicySettings& settings) : Push(settings), dice_(settings.seed) {}

 private:
    std::int32_t choose(const Fleet& fleet, const Request& request) override {
        std::int32_t able = 0, first = -1, second = -1;
        // Two of those that take it, without replacement, in one pass each.
        for (std::size_t w = 0; w < fleet.size(); ++w)
            able += takes(fleet.worker(w), fleet, request);
        if (able == 0) return -1;
        first = pick(fleet, request, dice_.below(able), -1);
        if (able > 1) second = pick(fleet, request, dice_.below(able - 1), first);
        if (second < 0) return first;
        const bool fewer = fleet.worker(second).all_count() < fleet.worker(first).all_count();
        return fewer ? second : first;
    }

    std::int32_t pick(const Fleet& fleet, const Request& request, std::size_t skip,
                      std::int32_t but) const {
        for (std::size_t w = 0;; ++w)
            if (static_cast<std::int32_t>(w) != but && takes(fleet.worker(w), fleet, request) &&
                skip-- == 0)
                return static_cast<std::int32_t>(w);
    }
    Dice dice_;
};

// Join the shortest queue: by requests, or by tokens (`jsq_load` of DP-BalanceRouter).
class Shortest final : public Push {
 public:
    using Measure = std::int64_t (Worker::*)() const;

    Shortest(const PolicySettings& settings, Measure measure)
        : Push(settings), measure_(measure) {}

 private:
    std::int32_t choose(const Fleet& fleet, const Request& request) override {
        return least(fleet, request, 0, [this](const Worker& w) { return (w.*measure_)(); });
    }
    Measure measure_;
};

// vLLM's internal balancer until the middle of 2026: 4 * waiting + running of a snapshot; a pick
// counts as one waiting request for each front end, until the next snapshot overwrites that.
class LegacySnapshot final : public Push {
 public:
    LegacySnapshot(const PolicySettings& settings, std::size_t workers)
        : Push(settings),
          front_ends_(settings.front_ends),
          start_(workers * static_cast<std::size_t>(settings.front_end) /
                 static_cast<std::size_t>(settings.front_ends)) {}

 private:
    std::int32_t choose(const Fleet& fleet, const Request& request) override {
        return least(fleet, request, start_, [](const Worker& w) {
            return 4 * w.report.waiting + w.report.running;
        });
    }
    void picked(Fleet& fleet, std::int32_t worker) override {
        fleet.worker_at(worker).report.waiting += front_ends_;
    }
    std::int64_t front_ends_;
    std::size_t start_;
};

// vLLM since PR 49204, with the rotation of PR 47420.
class Snapshot final : public Push {
 public:
    Snapshot(const PolicySettings& settings, std::size_t workers)
        : Push(settings),
          front_ends_(settings.front_ends),
          start_(workers * static_cast<std::size_t>(settings.front_end) /
                 static_cast<std::size_t>(settings.front_ends)) {}

 private:
    std::int32_t choose(const Fleet& fleet, const Request& request) override {
        return least(fleet, request, start_, [this](const Worker& w) {
            const Report& report = w.report;
            const std::int64_t requests =
                std::max(front_ends_ * w.count, report.waiting + report.running);
            const double pressure = std::max(0.0, report.kv_usage - 0.5);
            return static_cast<double>(requests) +
                   static_cast<double>(report.waiting) * 6 * pressure;
        });
    }
    void picked(Fleet& fleet, std::int32_t worker) override {
        fleet.worker_at(worker).report.waiting += front_ends_;
        start_ = (start_ + 1) % fleet.size();
    }
    std::int64_t front_ends_;
    std::size_t start_;
};

// SGLang's `total_tokens` of DP attention: (tokens, requests) of a snapshot, plus own picks since.
class TokenSnapshot final : public Push {
 public:
    using Push::Push;

 private:
    std::int32_t choose(const Fleet& fleet, const Request& request) override {
        size_ = request.size;
        return least(fleet, request, 0, [](const Worker& w) {
            return std::pair(w.report.tokens, w.report.waiting + w.report.running);
        });
    }
    void picked(Fleet& fleet, std::int32_t worker) override {
        Report& report = fleet.worker_at(worker).report;
        report.tokens += size_;
        ++report.waiting;
    }
    std::int64_t size_ = 0;
};

}  // namespace

std::unique_ptr<Policy> make_counting(const PolicySettings& settings, std::size_t workers) {
    const std::string& name = settings.name;
    if (name == "random") return std::make_unique<Random>(settings);
    if (name == "round_robin") return std::make_unique<RoundRobin>(settings);
    if (name == "power_of_two") return std::make_unique<PowerOfTwo>(settings);
    if (name == "jsq") return std::make_unique<Shortest>(settings, &Worker::all_count);
    if (name == "jsq_load") return std::make_unique<Shortest>(settings, &Worker::all_load);
    if (name == "vllm_legacy") return std::make_unique<LegacySnapshot>(settings, workers);
    if (name == "vllm") return std::make_unique<Snapshot>(settings, workers);
    if (name == "sglang_tokens") return std::make_unique<TokenSnapshot>(settings);
    return nullptr;
}

}  // namespace equipoise::requests
