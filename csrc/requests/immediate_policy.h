// Base of policies that bind every request at once, in order, to a worker that they choose.
#pragma once

#include "requests/policy.h"

namespace equipoise::requests {

class ImmediatePolicy : public Policy {
 public:
    explicit ImmediatePolicy(const PolicySettings& settings)
        : holds_when_full_(settings.when_full == "hold") {}

    void dispatch(RouterState& state) final {
        before_choices(state);
        while (state.first() >= 0) {
            const std::int32_t request = state.first();
            const std::int32_t worker = choose(state, state.request(request));
            if (worker < 0) return;
            state.bind(request, worker);
            after_bind(state, worker);
        }
    }

    bool queues() const final { return !holds_when_full_; }

 protected:
    // Whether a worker may get the request.
    bool accepts(const Worker& worker, const RouterState& state, const Request& request) const {
        return holds_when_full_ ? state.fits(worker, request) : worker.serves();
    }

    // Returns the worker with the least `score(worker)` of those that accept the request, ties to
    // the first from `start` on; -1 if none does.
    template <typename Score>
    std::int32_t least_scored(const RouterState& state, const Request& request, std::size_t start,
                              Score score) const {
        std::int32_t best = -1;
        decltype(score(state.worker(0))) lowest{};
        for (std::size_t i = 0, w = start; i < state.size(); ++i, ++w) {
            if (w >= state.size()) w -= state.size();
            const Worker& worker = state.worker(w);
            if (!accepts(worker, state, request)) continue;
            const auto value = score(worker);
            if (best >= 0 && !(value < lowest)) continue;
            best = static_cast<std::int32_t>(w);
            lowest = value;
        }
        return best;
    }

    // Called once per dispatch, before the first choice.
    virtual void before_choices(const RouterState& state) { static_cast<void>(state); }
    virtual std::int32_t choose(const RouterState& state, const Request& request) = 0;
    // Called after each binding, so that a policy can count its own picks until the next report.
    virtual void after_bind(RouterState& state, std::int32_t worker) {
        static_cast<void>(state);
        static_cast<void>(worker);
    }

 private:
    bool holds_when_full_;
};

}  // namespace equipoise::requests
