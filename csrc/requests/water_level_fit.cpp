// Policy `fit`, the water level: binds the request that brings the emptiest worker nearest to where
// all workers will stand once their free slots are filled. docs/design/request-balance.md says why.
// Its settings are in parts of what waits and runs, so that they fit any sizes of requests.
#include <algorithm>
#include <cmath>

#include "requests/output_lengths.h"
#include "requests/policy.h"

namespace equipoise::requests {
namespace {

// A request that has waited so many times as long as those that were bound has waited too long: see
// WaterLevelFitPolicy::wait_credit.
constexpr double kLongWait = 8;
constexpr std::int64_t kMeanOf = 512;  // requests, of a mean that forgets

// What decides whether a worker is too heavy to get requests, over all serving workers.
struct LoadLimits {
    double mean = 0;       // of the loads
    double weight = 0;     // of a request on a worker, in the mean
    double share = 0;      // load for each token of capacity
    double deviation = 0;  // standard deviation of the loads from the workers' shares
};

// Free slots of the serving workers, and what a step costs now.
struct SlotSurvey {
    bool all_open = true;  // every worker has a free slot
    double slots = 0, running = 0;
    double wanted = 0;    // free slots of workers that are not too heavy to get requests
    double envelope = 0;  // the largest load, which decides the time of a step
};

class WaterLevelFitPolicy final : public Policy {
 public:
    explicit WaterLevelFitPolicy(const PolicySettings& settings) : settings_(settings) {}

    void dispatch(RouterState& state) override {
        if (should_gather(state)) return;
        // Once for all that this decision binds. Taken anew after each request, the level would
        // rise with every one that is larger than the mean: the emptiest worker gets such a one,
        // and there would always be an emptiest, until all stand where the fullest does.
        const double level = mean_end_load(state, mean_size(state));
        for (bool bound = true; bound && state.pooled() > 0;) {
            const std::int64_t free = state.free_slots();
            if (free == 0) return;
            bound = state.pooled() >= free ? bind_closest(state, level) : bind_largest(state);
        }
    }

    void finished(std::int64_t made) override {
        tokens_ += made;
        ++ended_;
    }

 private:
    // Whether to leave requests in the pool until every worker has a free slot, so that prompts are
    // computed at the same time: a worker that computes one alone holds all others up at the
    // barrier. Without a barrier it holds up nobody else. Waits until that has cost as much as computing one prompt alone, which is the rule
    // for an acknowledgement that may be delayed (Dooly, Goldman, Scott, JACM 48(2), 2001).
    bool should_gather(const RouterState& state) {
        const double alone =
            settings_.lockstep ? settings_.prefill_wait * prompt_weight(state) : 0;
        const std::int64_t free = alone > 0 ? state.free_slots() : 0;
        const SlotSurvey slots = free > 0 ? survey_slots(state) : SlotSurvey{};
        if (slots.all_open || slots.running == 0) {
            gathered_at_ = -1;
            return false;
        }
        if (gathered_at_ < 0) lost_ = 0;
        const auto steps =
            gathered_at_ < 0 ? 0 : static_cast<double>(state.made() - gathered_at_) / slots.running;
        gathered_at_ = state.made();
        // With more requests than free slots, the free slots lose their part of a step. With fewer,
        // every request in the pool could have run, and loses the whole step.
        const bool scarce = state.pooled() >= free;
        const double part = scarce ? slots.wanted / slots.slots : 1;
        lost_ += steps * part * (slots.envelope + fixed_load(state));
        if (lost_ < alone * mean_missing(state, std::min(free, settings_.window))) return true;
        gathered_at_ = -1;
        return false;
    }

    SlotSurvey survey_slots(const RouterState& state) const {
        const LoadLimits limits = survey_limits(state);
        SlotSurvey slots;
        for (std::size_t w = 0; w < state.size(); ++w) {
            const Worker& worker = state.worker(w);
            if (!worker.serves()) continue;
            slots.all_open &= worker.free_slots() > 0;
            slots.slots += static_cast<double>(worker.slots);
            slots.running += static_cast<double>(worker.running);
            if (!too_heavy(worker, limits))
                slots.wanted += static_cast<double>(worker.free_slots());
            slots.envelope = std::max(slots.envelope, static_cast<double>(worker.all_load()));
        }
        return slots;
    }

    LoadLimits survey_limits(const RouterState& state) const {
        double loads = 0, requests = 0, serving = 0, capacities = 0, squares = 0;
        for (std::size_t w = 0; w < state.size(); ++w) {
            const Worker& worker = state.worker(w);
            if (!worker.serves()) continue;
            loads += static_cast<double>(worker.all_load());
            requests += static_cast<double>(worker.all_count());
            serving += 1;
        }
        LoadLimits limits;
        limits.mean = loads / serving;
        limits.weight = requests > 0 ? loads / requests : 1;
        for (std::size_t w = 0; w < state.size(); ++w)
            if (state.worker(w).serves()) capacities += capacity(state.worker(w), limits);
        limits.share = capacities > 0 ? loads / capacities : 0;
        for (std::size_t w = 0; w < state.size(); ++w) {
            const Worker& worker = state.worker(w);
            if (!worker.serves()) continue;
            const double distance =
                static_cast<double>(worker.all_load()) - limits.share * capacity(worker, limits);
            squares += distance * distance;
        }
        limits.deviation = std::sqrt(squares / serving);
        return limits;
    }

    // Tokens of the requests that it can run at once.
    static double capacity(const Worker& worker, const LoadLimits& limits) {
        return std::min(static_cast<double>(worker.slots) * limits.weight,
                        static_cast<double>(worker.room));
    }

    // Whether a request there would hold all others up. A worker with more slots than others may
    // have its share of the load, one with fewer as much as the others. In standard deviations:
    // with few slots, or outputs of very different lengths, loads lie far apart by nature, and a
    // set part of the mean would leave slots empty for nothing.
    bool too_heavy(const Worker& worker, const LoadLimits& limits) const {
        const double share = limits.share * capacity(worker, limits);
        return static_cast<double>(worker.all_load()) >
               std::max(limits.mean, share) + settings_.slack * limits.deviation;
    }

    // Mean of the prompt tokens that the first requests have to compute, each on the worker that
    // has most of it cached.
    static double mean_missing(const RouterState& state, std::int64_t most) {
        std::int64_t sum = 0, count = 0;
        for (std::int32_t r = state.first(); r >= 0 && count < most; r = state.after(r), ++count) {
            const Request& request = state.request(r);
            std::int32_t hit = 0;
            for (const std::int32_t cached : request.hits) hit = std::max(hit, cached);
            sum += std::max<std::int64_t>(request.size - hit, 0);
        }
        return static_cast<double>(sum) / static_cast<double>(count);
    }

    // There are at least as many requests as free slots. All slots will be filled, so what matters
    // is where the workers stand then, not now. Binds one request; the next one sees the new loads.
    bool bind_closest(RouterState& state, double level) {
        const double size = mean_size(state);
        const LoadLimits limits = survey_limits(state);
        passed_over_.assign(state.size(), 0);
        for (std::int32_t w = next_worker(state, size, limits); w >= 0;
             w = next_worker(state, size, limits)) {
            const double need = level - (end_load(state.worker(w), size) - size);
            const std::int32_t request = closest_request(state, w, need, size);
            if (request >= 0) {
                bind(state, request, w);
                return true;
            }
            passed_over_[w] = 1;  // its KV cache has no room for any request of the window
        }
        return false;
    }

    // Of all that wait.
    static double mean_size(const RouterState& state) {
        return static_cast<double>(state.pooled_tokens()) / static_cast<double>(state.pooled());
    }

    static double end_load(const Worker& worker, double size) {
        return static_cast<double>(worker.all_load()) +
               static_cast<double>(worker.free_slots()) * size;
    }

    // The level: the mean of the loads that the serving workers will have.
    static double mean_end_load(const RouterState& state, double size) {
        double end_loads = 0, serving = 0;
        for (std::size_t w = 0; w < state.size(); ++w) {
            const Worker& worker = state.worker(w);
            if (!worker.serves()) continue;
            end_loads += end_load(worker, size);
            serving += 1;
        }
        return end_loads / serving;
    }

    // Returns the worker with a free slot and the lowest end. One that is too heavy is passed over;
    // the others do not wait for it.
    std::int32_t next_worker(const RouterState& state, double size,
                             const LoadLimits& limits) const {
        std::int32_t best = -1;
        double lowest = 0;
        for (std::size_t w = 0; w < state.size(); ++w) {
            const Worker& worker = state.worker(w);
            if (worker.free_slots() == 0 || passed_over_[w]) continue;
            if (too_heavy(worker, limits)) continue;
            if (best >= 0 && end_load(worker, size) >= lowest) continue;
            best = static_cast<std::int32_t>(w);
            lowest = end_load(worker, size);
        }
        return best;
    }

    // Returns the request of the window whose size is nearest to what the worker needs: what is
    // larger counts as further away (overshoot_cost). Requests that have waited longer, or have
    // tokens cached there, count as nearer.
    std::int32_t closest_request(RouterState& state, std::int32_t w, double need,
                                 double mean_size) {
        const double overshoot = overshoot_cost(state, w, mean_size);
        std::int32_t best = -1;
        double least = 0;
        std::int64_t left = settings_.window;
        for (std::int32_t r = state.first(); r >= 0 && left-- > 0; r = state.after(r)) {
            const Request& request = state.request(r);
            if (request.first_seen < 0) state.mark_seen(r);
            if (!state.fits(state.worker(w), request)) continue;
            const auto waited = static_cast<double>(state.steps() - request.first_seen);
            const double distance = static_cast<double>(request.size) - need;
            const double cost = (distance > 0 ? overshoot * distance : -distance) -
                                mean_size * wait_credit(waited) -
                                cache_credit(state, request, w);
            if (best >= 0 && cost >= least) continue;
            best = r;
            least = cost;
        }
        return best;
    }

    // What a token above the level costs, in tokens below it. All workers wait for the fullest, so
    // there it costs as many as there are workers. Another one only may become the fullest.
    double overshoot_cost(const RouterState& state, std::int32_t w, double size) const {
        const auto workers = static_cast<double>(state.count_present());
        const double cost = std::max(1.0, settings_.overshoot * workers);
        const double end = end_load(state.worker(w), size);
        for (std::size_t other = 0; other < state.size(); ++other)
            if (!state.worker(other).lost() && end_load(state.worker(other), size) > end)
                return cost;
        return std::max(cost, workers);
    }

    // What waiting is worth, in mean sizes. In proportion to the steps, and, once a request has
    // waited much longer than others do, to the square of the rest: a large one among small ones
    // would otherwise wait in proportion to its size times the number of workers.
    double wait_credit(double waited) const {
        const double excess =
            settings_.wait_bonus * std::max(0.0, waited - kLongWait * mean_wait_);
        return settings_.wait_bonus * waited + excess * excess / 4;
    }

    void bind(RouterState& state, std::int32_t r, std::int32_t w) {
        const std::int64_t seen = state.request(r).first_seen;
        const auto waited = static_cast<double>(seen < 0 ? 0 : state.steps() - seen);
        ++bound_;
        mean_wait_ += (waited - mean_wait_) / static_cast<double>(std::min(bound_, kMeanOf));
        state.bind(r, w);
    }

    // There are fewer requests than free slots: the largest goes first, to the lightest worker with
    // room for it. A request that fits nowhere is passed over.
    bool bind_largest(RouterState& state) {
        std::int32_t largest = -1, worker = -1;
        std::int64_t left = settings_.window;
        for (std::int32_t r = state.first(); r >= 0 && left-- > 0; r = state.after(r)) {
            const Request& request = state.request(r);
            if (largest >= 0 && request.size <= state.request(largest).size) continue;
            const std::int32_t lightest = lightest_for(state, request);
            if (lightest < 0) continue;
            largest = r;
            worker = lightest;
        }
        if (largest < 0) return false;
        bind(state, largest, worker);
        return true;
    }

    // A worker may be heavier by what its cache saves, times the number of workers: load costs time
    // on the fullest worker only, but a prompt holds all of them up wherever it is computed.
    std::int32_t lightest_for(const RouterState& state, const Request& request) const {
        const auto workers = static_cast<double>(state.count_present());
        std::int32_t best = -1;
        double least = 0;
        for (std::size_t w = 0; w < state.size(); ++w) {
            const auto index = static_cast<std::int32_t>(w);
            if (!state.fits(state.worker(w), request)) continue;
            const double cost = static_cast<double>(state.worker(w).all_load()) -
                                workers * cache_credit(state, request, index);
            if (best >= 0 && cost >= least) continue;
            best = index;
            least = cost;
        }
        return best;
    }

    // What cached tokens save, in load over the life of a request: a prompt is computed once, while
    // load is read at every step. Without a finished request the length of a life is not known.
    double cache_credit(const RouterState& state, const Request& request, std::int32_t w) const {
        const double weight = prompt_weight(state);
        if (weight <= 0 || tokens_ == 0) return 0;
        const double steps = static_cast<double>(tokens_) / static_cast<double>(ended_);
        return weight * static_cast<double>(request.hit(w)) / steps;
    }

    // What a step takes besides reading and computing, in KV tokens read. Known only if fitted.
    double fixed_load(const RouterState& state) const {
        return settings_.prompt_weight ? 0 : state.fitted_fixed_load();
    }

    double prompt_weight(const RouterState& state) const {
        return settings_.prompt_weight ? *settings_.prompt_weight : state.fitted_prompt_weight();
    }

    PolicySettings settings_;
    // Tokens made when requests were last left in the pool to gather, or -1; and what that has cost
    // so far, in KV tokens read. Time is counted in tokens, because a policy has no clock.
    std::int64_t gathered_at_ = -1;
    double lost_ = 0;
    std::int64_t tokens_ = 0, ended_ = 0;  // of requests that have ended
    // Requests that were bound, and the steps that the latest of them had waited in the mean. Of
    // those that wait it would not do: the larger ones pile up there.
    std::int64_t bound_ = 0;
    double mean_wait_ = 0;
    std::vector<char> passed_over_;        // by worker, within one decision
};

}  // namespace

std::unique_ptr<Policy> make_water_level_fit(const PolicySettings& settings) {
    return settings.name == "fit" ? std::make_unique<WaterLevelFitPolicy>(settings) : nullptr;
}

}  // namespace equipoise::requests
