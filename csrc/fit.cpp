// Water-level fit: the request that brings the emptiest worker to where all will stand once the
// free slots are filled. docs/design/request-balance.md says why.
#include <algorithm>
#include <cmath>

#include "lengths.h"
#include "policy.h"

namespace equipoise {
namespace {

// What a decision looks at, of all workers that serve.
struct Level {
    double ends = 0;   // sum of the loads that they will have, all free slots filled
    double loads = 0;  // sum of the loads that they have
    double serving = 0;
    double lowest = 0;         // end of the target
    std::int32_t target = -1;  // the worker with the lowest end that has a free slot
};

class Fit final : public Policy {
 public:
    explicit Fit(const PolicySettings& settings) : settings_(settings) {}

    void dispatch(Fleet& fleet) override {
        ++decision_;
        for (bool bound = true; bound && fleet.pooled() > 0;) {
            std::int64_t free = 0;
            for (std::size_t w = 0; w < fleet.size(); ++w) free += fleet.worker(w).free();
            if (free == 0) return;
            bound = fleet.pooled() >= free ? fill(fleet, free) : spread(fleet);
        }
    }

    void finished(std::int64_t made) override {
        tokens_ += made;
        ++ended_;
    }

 private:
    // At least as many requests as free slots: all will be filled, so what matters is where the
    // workers stand then.
    bool fill(Fleet& fleet, std::int64_t free) {
        const double size = mean_size(fleet, std::min(free, settings_.window));
        const Level level = survey(fleet, size);
        const Worker& target = fleet.worker(level.target);
        // A worker above the others is not given what would hold all of them up.
        const double mean = level.loads / level.serving;
        if (static_cast<double>(target.all_load()) > mean * (1 + settings_.slack)) return false;
        const double need = level.ends / level.serving - (level.lowest - size);
        const std::int32_t request = closest(fleet, level.target, need);
        if (request < 0) return false;
        fleet.bind(request, level.target);
        return true;
    }

    Level survey(const Fleet& fleet, double size) const {
        Level level;
        for (std::size_t w = 0; w < fleet.size(); ++w) {
            const Worker& worker = fleet.worker(w);
            if (!worker.serves()) continue;
            const auto load = static_cast<double>(worker.all_load());
            const double end = load + static_cast<double>(worker.free()) * size;
            level.serving += 1;
            level.loads += load;
            level.ends += end;
            if (worker.free() == 0 || (level.target >= 0 && end >= level.lowest)) continue;
            level.target = static_cast<std::int32_t>(w);
            level.lowest = end;
        }
        return level;
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
    // a worker may be heavier by what its cache saves.
    bool spread(Fleet& fleet) {
        std::int32_t largest = -1;
        std::int64_t left = settings_.window;
        for (std::int32_t r = fleet.first(); r >= 0 && left-- > 0; r = fleet.after(r))
            if (largest < 0 || fleet.request(r).size > fleet.request(largest).size) largest = r;
        const Request& request = fleet.request(largest);
        std::int32_t best = -1;
        double least = 0;
        for (std::size_t w = 0; w < fleet.size(); ++w) {
            const auto index = static_cast<std::int32_t>(w);
            if (!fleet.fits(fleet.worker(w), request)) continue;
            const double cost =
                static_cast<double>(fleet.worker(w).all_load()) - credit(request, index);
            if (best >= 0 && cost >= least) continue;
            best = index;
            least = cost;
        }
        if (best < 0) return false;
        fleet.bind(largest, best);
        return true;
    }

    // What cached tokens save, as load over the life of a request: they are computed once, load is
    // read at every step.
    double credit(const Request& request, std::int32_t w) const {
        if (static_cast<std::size_t>(w) >= request.hits.size() || settings_.prompt_weight <= 0 || tokens_ == 0) return 0;
        const double steps = static_cast<double>(tokens_) / static_cast<double>(ended_);
        return settings_.prompt_weight * static_cast<double>(request.hits[w]) / steps;
    }

    static double mean_size(const Fleet& fleet, std::int64_t most) {
        std::int64_t sum = 0, count = 0;
        for (std::int32_t r = fleet.first(); r >= 0 && count < most; r = fleet.after(r), ++count)
            sum += fleet.request(r).size;
        return static_cast<double>(sum) / static_cast<double>(count);
    }

    PolicySettings settings_;
    std::int64_t decision_ = 0;
    std::int64_t tokens_ = 0, ended_ = 0;  // of requests that have ended
};

}  // namespace

std::unique_ptr<Policy> make_fit(const PolicySettings& settings) {
    return settings.name == "fit" ? std::make_unique<Fit>(settings) : nullptr;
}

}  // namespace equipoise
