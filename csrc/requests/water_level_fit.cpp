// Water-level fit: the request that brings the emptiest worker to where all will stand once the
// free slots are filled. docs/design/request-balance.md says why.
#include <algorithm>
#include <cmath>

#include "requests/output_lengths.h"
#include "requests/policy.h"

namespace equipoise::requests {
namespace {

// What a decision looks at, of all workers that serve.
struct WaterLevel {
    double end_loads = 0;  // sum of the loads that they will have, all free slots filled
    double loads = 0;      // sum of the loads that they have
    double serving = 0;
};

// What a request would find that came to the workers now.
struct SlotSurvey {
    bool all_open = true;  // each has a free slot
    double slots = 0, running = 0;
    double wanted = 0;    // free slots of workers that are not too heavy to get anything
    double envelope = 0;  // the largest load: what a step takes
};

class WaterLevelFitPolicy final : public Policy {
 public:
    explicit WaterLevelFitPolicy(const PolicySettings& settings) : settings_(settings) {}

    void dispatch(RouterState& state) override {
        ++decision_;
        if (should_gather(state)) return;
        for (bool bound = true; bound && state.pooled() > 0;) {
            const std::int64_t free = state.free_slots();
            if (free == 0) return;
            bound = state.pooled() >= free ? bind_closest(state, free) : bind_largest(state);
        }
    }

    void finished(std::int64_t made) override {
        tokens_ += made;
        ++ended_;
    }

 private:
    // Whether requests are left in the pool, so that workers compute their prompts at the same
    // time: who computes alone holds all of them up. As with an acknowledgement that may be delayed
    // (Dooly, Goldman, Scott, JACM 48(2), 2001), until the waiting has cost what computing one
    // alone would.
    bool should_gather(const RouterState& state) {
        const double alone = settings_.gather * settings_.prompt_weight;
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
        // Free slots lose their part of a step; who could have had one anyway loses the whole.
        const bool scarce = state.pooled() >= free;
        const double part = scarce ? slots.wanted / slots.slots : 1;
        lost_ += steps * part * slots.envelope;
        if (lost_ < alone * mean_missing(state, std::min(free, settings_.window))) return true;
        gathered_at_ = -1;
        return false;
    }

    SlotSurvey survey_slots(const RouterState& state) const {
        const double most = max_load(survey_load(state, 0));
        SlotSurvey slots;
        for (std::size_t w = 0; w < state.size(); ++w) {
            const Worker& worker = state.worker(w);
            if (!worker.serves()) continue;
            const auto load = static_cast<double>(worker.all_load());
            slots.all_open &= worker.free_slots() > 0;
            slots.slots += static_cast<double>(worker.slots);
            slots.running += static_cast<double>(worker.running);
            slots.wanted += load <= most ? static_cast<double>(worker.free_slots()) : 0;
            slots.envelope = std::max(slots.envelope, load);
        }
        return slots;
    }

    // The load above which a worker gets nothing.
    double max_load(const WaterLevel& level) const {
        return level.loads / level.serving * (1 + settings_.slack);
    }

    // Prompt tokens of the first requests that have to be computed, where most of them are cached.
    static double mean_missing(const RouterState& state, std::int64_t most) {
        return mean(state, most, [](const Request& request) {
            std::int32_t hit = 0;
            for (const std::int32_t cached : request.hits) hit = std::max(hit, cached);
            return std::max<std::int64_t>(request.size - hit, 0);
        });
    }

    // At least as many requests as free slots: all will be filled, so what matters is where the
    // workers stand then.
    bool bind_closest(RouterState& state, std::int64_t free) {
        const double size = mean_size(state, std::min(free, settings_.window));
        const WaterLevel level = survey_load(state, size);
        const double most = max_load(level);
        passed_over_.assign(state.size(), 0);
        for (std::int32_t w = next_worker(state, size, most); w >= 0;
             w = next_worker(state, size, most)) {
            const double need =
                level.end_loads / level.serving - (end_load(state.worker(w), size) - size);
            const std::int32_t request = closest_request(state, w, need);
            if (request >= 0) {
                state.bind(request, w);
                return true;
            }
            passed_over_[w] = 1;  // its cache has no room for any of them
        }
        return false;
    }

    static double end_load(const Worker& worker, double size) {
        return static_cast<double>(worker.all_load()) +
               static_cast<double>(worker.free_slots()) * size;
    }

    static WaterLevel survey_load(const RouterState& state, double size) {
        WaterLevel level;
        for (std::size_t w = 0; w < state.size(); ++w) {
            const Worker& worker = state.worker(w);
            if (!worker.serves()) continue;
            level.serving += 1;
            level.loads += static_cast<double>(worker.all_load());
            level.end_loads += end_load(worker, size);
        }
        return level;
    }

    // The worker with the lowest end that has a free slot. One with more than `most` is passed
    // over: what it would get would hold all of them up. The others are not to wait for that.
    std::int32_t next_worker(const RouterState& state, double size, double most) const {
        std::int32_t best = -1;
        double lowest = 0;
        for (std::size_t w = 0; w < state.size(); ++w) {
            const Worker& worker = state.worker(w);
            if (worker.free_slots() == 0 || passed_over_[w]) continue;
            if (static_cast<double>(worker.all_load()) > most) continue;
            if (best >= 0 && end_load(worker, size) >= lowest) continue;
            best = static_cast<std::int32_t>(w);
            lowest = end_load(worker, size);
        }
        return best;
    }

    // Of the window, the request whose size is nearest to what is needed; who has waited longer is
    // nearer, and who has tokens cached there.
    std::int32_t closest_request(RouterState& state, std::int32_t w, double need) {
        std::int32_t best = -1;
        double least = 0;
        std::int64_t left = settings_.window;
        for (std::int32_t r = state.first(); r >= 0 && left-- > 0; r = state.after(r)) {
            const Request& request = state.request(r);
            if (request.first_seen < 0) state.mark_seen(r, decision_);
            if (!state.fits(state.worker(w), request)) continue;
            const auto waited = static_cast<double>(decision_ - request.first_seen);
            const double cost = std::abs(static_cast<double>(request.size) - need) -
                                settings_.ageing * waited - cache_credit(request, w);
            if (best >= 0 && cost >= least) continue;
            best = r;
            least = cost;
        }
        return best;
    }

    // Fewer requests than free slots: the largest first, each to the lightest worker that takes it;
    // a worker may be heavier by what its cache saves. Who fits nowhere is passed over.
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
        state.bind(largest, worker);
        return true;
    }

    // Of all workers at the barrier one is the fullest, and only there does load cost anything; a
    // prompt holds up all of them wherever it is computed. So cached tokens count for each worker.
    std::int32_t lightest_for(const RouterState& state, const Request& request) const {
        const auto workers = static_cast<double>(state.count_present());
        std::int32_t best = -1;
        double least = 0;
        for (std::size_t w = 0; w < state.size(); ++w) {
            const auto index = static_cast<std::int32_t>(w);
            if (!state.fits(state.worker(w), request)) continue;
            const double cost = static_cast<double>(state.worker(w).all_load()) -
                                workers * cache_credit(request, index);
            if (best >= 0 && cost >= least) continue;
            best = index;
            least = cost;
        }
        return best;
    }

    // What cached tokens save, as load over the life of a request: they are computed once, load is
    // read at every step.
    double cache_credit(const Request& request, std::int32_t w) const {
        if (settings_.prompt_weight <= 0 || tokens_ == 0) return 0;
        const double steps = static_cast<double>(tokens_) / static_cast<double>(ended_);
        return settings_.prompt_weight * static_cast<double>(request.hit(w)) / steps;
    }

    static double mean_size(const RouterState& state, std::int64_t most) {
        return mean(state, most, [](const Request& request) { return request.size; });
    }

    // Over the first requests of the pool.
    template <typename Of>
    static double mean(const RouterState& state, std::int64_t most, Of of) {
        std::int64_t sum = 0, count = 0;
        for (std::int32_t r = state.first(); r >= 0 && count < most; r = state.after(r), ++count)
            sum += of(state.request(r));
        return static_cast<double>(sum) / static_cast<double>(count);
    }

    PolicySettings settings_;
    std::int64_t decision_ = 0;
    std::int64_t gathered_at_ =
        -1;            // tokens made when requests were last left waiting for each other
    double lost_ = 0;  // by that, in KV tokens read
    std::int64_t tokens_ = 0, ended_ = 0;  // of requests that have ended
    std::vector<char> passed_over_;
};

}  // namespace

std::unique_ptr<Policy> make_water_level_fit(const PolicySettings& settings) {
    return settings.name == "fit" ? std::make_unique<WaterLevelFitPolicy>(settings) : nullptr;
}

}  // namespace equipoise::requests
