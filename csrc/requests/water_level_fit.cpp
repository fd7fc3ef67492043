// Water-level fit: the request that brings the emptiest worker to where all will stand once the
// free slots are filled. docs/design/request-balance.md says why.
#include <algorithm>
#include <cmath>

#include "requests/output_lengths.h"
#include "requests/policy.h"

namespace equipoise::requests {
namespace {

// What a decision looks at, of all workers that serve.
struct Level {
    double ends = 0;   // sum of the loads that they will have, all free slots filled
    double loads = 0;  // sum of the loads that they have
    double serving = 0;
};

// What a request would find that came to the workers now.
struct Doors {
    bool all_open = true;  // each has a free slot
    double slots = 0, running = 0;
    double wanted = 0;    // free slots of workers that are not too heavy to get anything
    double envelope = 0;  // the largest load: what a step takes
};

class Fit final : public Policy {
 public:
    explicit Fit(const PolicySettings& settings) : settings_(settings) {}

    void dispatch(Fleet& fleet) override {
        ++decision_;
        if (gathers(fleet)) return;
        for (bool bound = true; bound && fleet.pooled() > 0;) {
            const std::int64_t free = fleet.free();
            if (free == 0) return;
            bound = fleet.pooled() >= free ? fill(fleet, free) : spread(fleet);
        }
    }

    void finished(std::int64_t made) override {
        tokens_ += made;
        ++ended_;
    }

 private:
    // Whether requests are left in the pool, so that workers compute their prompts at the same time:
    // who computes alone holds all of them up. As with an acknowledgement that may be delayed (Dooly,
    // Goldman, Scott, JACM 48(2), 2001), until the waiting has cost what computing one alone would.
    bool gathers(const Fleet& fleet) {
        const double alone = settings_.gather * settings_.prompt_weight;
        const std::int64_t free = alone > 0 ? fleet.free() : 0;
        const Doors doors = free > 0 ? look(fleet) : Doors{};
        if (doors.all_open || doors.running == 0) {
            looked_ = -1;
            return false;
        }
        if (looked_ < 0) lost_ = 0;
        const auto steps = looked_ < 0 ? 0 : static_cast<double>(fleet.made() - looked_) / doors.running;
        looked_ = fleet.made();
        // Free slots lose their part of a step; who could have had one anyway loses the whole.
        const bool scarce = fleet.pooled() >= free;
        const double part = scarce ? doors.wanted / doors.slots : 1;
        lost_ += steps * part * doors.envelope;
        if (lost_ < alone * mean_missing(fleet, std::min(free, settings_.window))) return true;
        looked_ = -1;
        return false;
    }

    Doors look(const Fleet& fleet) const {
        const double most = heaviest(survey(fleet, 0));
        Doors doors;
        for (std::size_t w = 0; w < fleet.size(); ++w) {
            const Worker& worker = fleet.worker(w);
            if (!worker.serves()) continue;
            const auto load = static_cast<double>(worker.all_load());
            doors.all_open &= worker.free() > 0;
            doors.slots += static_cast<double>(worker.slots);
            doors.running += static_cast<double>(worker.running);
            doors.wanted += load <= most ? static_cast<double>(worker.free()) : 0;
            doors.envelope = std::max(doors.envelope, load);
        }
        return doors;
    }

    // The load above which a worker gets nothing.
    double heaviest(const Level& level) const {
        return level.loads / level.serving * (1 + settings_.slack);
    }

    // Prompt tokens of the first requests that have to be computed, where most of them are cached.
    static double mean_missing(const Fleet& fleet, std::int64_t most) {
        return mean(fleet, most, [](const Request& request) {
            std::int32_t hit = 0;
            for (const std::int32_t cached : request.hits) hit = std::max(hit, cached);
            return std::max<std::int64_t>(request.size - hit, 0);
        });
    }

    // At least as many requests as free slots: all will be filled, so what matters is where the
    // workers stand then.
    bool fill(Fleet& fleet, std::int64_t free) {
        const double size = mean_size(fleet, std::min(free, settings_.window));
        const Level level = survey(fleet, size);
        const double most = heaviest(level);
        passed_.assign(fleet.size(), 0);
        for (std::int32_t w = target(fleet, size, most); w >= 0; w = target(fleet, size, most)) {
            const double need = level.ends / level.serving - (end(fleet.worker(w), size) - size);
            const std::int32_t request = closest(fleet, w, need);
            if (request >= 0) {
                fleet.bind(request, w);
                return true;
            }
            passed_[w] = 1;  // its cache has no room for any of them
        }
        return false;
    }

    static double end(const Worker& worker, double size) {
        return static_cast<double>(worker.all_load()) + static_cast<double>(worker.free()) * size;
    }

    static Level survey(const Fleet& fleet, double size) {
        Level level;
        for (std::size_t w = 0; w < fleet.size(); ++w) {
            const Worker& worker = fleet.worker(w);
            if (!worker.serves()) continue;
            level.serving += 1;
            level.loads += static_cast<double>(worker.all_load());
            level.ends += end(worker, size);
        }
        return level;
    }

    // The worker with the lowest end that has a free slot. One with more than `most` is passed over:
    // what it would get would hold all of them up. The others are not to wait for that.
    std::int32_t target(const Fleet& fleet, double size, double most) const {
        std::int32_t best = -1;
        double lowest = 0;
        for (std::size_t w = 0; w < fleet.size(); ++w) {
            const Worker& worker = fleet.worker(w);
            if (worker.free() == 0 || passed_[w]) continue;
            if (static_cast<double>(worker.all_load()) > most) continue;
            if (best >= 0 && end(worker, size) >= lowest) continue;
            best = static_cast<std::int32_t>(w);
            lowest = end(worker, size);
        }
        return best;
    }

    // Of the window, the request whose size is nearest to what is needed; who has waited longer is
    // nearer, and who has tokens cached there.
    std::int32_t closest(Fleet& fleet, std::int32_t w, double need) {
        std::int32_t best = -1;
        double least = 0;
        std::int64_t left = settings_.window;
        for (std::int32_t r = fleet.first(); r >= 0 && left-- > 0; r = fleet.after(r)) {
            const Request& request = fleet.request(r);
            if (request.seen < 0) fleet.see(r, decision_);
            if (!fleet.fits(fleet.worker(w), request)) continue;
            const auto waited = static_cast<double>(decision_ - request.seen);
            const double cost = std::abs(static_cast<double>(request.size) - need) -
                                settings_.ageing * waited - credit(request, w);
            if (best >= 0 && cost >= least) continue;
            best = r;
            least = cost;
        }
        return best;
    }

    // Fewer requests than free slots: the largest first, each to the lightest worker that takes it;
    // a worker may be heavier by what its cache saves. Who fits nowhere is passed over.
    bool spread(Fleet& fleet) {
        std::int32_t largest = -1, worker = -1;
        std::int64_t left = settings_.window;
        for (std::int32_t r = fleet.first(); r >= 0 && left-- > 0; r = fleet.after(r)) {
            const Request& request = fleet.request(r);
            if (largest >= 0 && request.size <= fleet.request(largest).size) continue;
            const std::int32_t lightest = lightest_for(fleet, request);
            if (lightest < 0) continue;
            largest = r;
            worker = lightest;
        }
        if (largest < 0) return false;
        fleet.bind(largest, worker);
        return true;
    }

    // Of all workers at the barrier one is the fullest, and only there does load cost anything; a
    // prompt holds up all of them wherever it is computed. So cached tokens count for each worker.
    std::int32_t lightest_for(const Fleet& fleet, const Request& request) const {
        const auto workers = static_cast<double>(fleet.present());
        std::int32_t best = -1;
        double least = 0;
        for (std::size_t w = 0; w < fleet.size(); ++w) {
            const auto index = static_cast<std::int32_t>(w);
            if (!fleet.fits(fleet.worker(w), request)) continue;
            const double cost =
                static_cast<double>(fleet.worker(w).all_load()) - workers * credit(request, index);
            if (best >= 0 && cost >= least) continue;
            best = index;
            least = cost;
        }
        return best;
    }

    // What cached tokens save, as load over the life of a request: they are computed once, load is
    // read at every step.
    double credit(const Request& request, std::int32_t w) const {
        if (settings_.prompt_weight <= 0 || tokens_ == 0) return 0;
        const double steps = static_cast<double>(tokens_) / static_cast<double>(ended_);
        return settings_.prompt_weight * static_cast<double>(request.hit(w)) / steps;
    }

    static double mean_size(const Fleet& fleet, std::int64_t most) {
        return mean(fleet, most, [](const Request& request) { return request.size; });
    }

    // Over the first requests of the pool.
    template <typename Of>
    static double mean(const Fleet& fleet, std::int64_t most, Of of) {
        std::int64_t sum = 0, count = 0;
        for (std::int32_t r = fleet.first(); r >= 0 && count < most; r = fleet.after(r), ++count)
            sum += of(fleet.request(r));
        return static_cast<double>(sum) / static_cast<double>(count);
    }

    PolicySettings settings_;
    std::int64_t decision_ = 0;
    std::int64_t looked_ = -1;  // tokens made when requests were last left waiting for each other
    double lost_ = 0;           // by that, in KV tokens read
    std::int64_t tokens_ = 0, ended_ = 0;  // of requests that have ended
    std::vector<char> passed_;
};

}  // namespace

std::unique_ptr<Policy> make_fit(const PolicySettings& settings) {
    return settings.name == "fit" ? std::make_unique<Fit>(settings) : nullptr;
}

}  // namespace equipoise::requests
