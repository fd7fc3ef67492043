// A policy that binds every request as soon as it is its turn, to a worker that it chooses.
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
    bool accepts(const Worker& worker, const RouterState& state, const Request& request) const {
        return holds_when_full_ ? state.fits(worker, request) : worker.serves();
    }

    // Of those that take it the one with the least `score(worker)`; ties go to the first from
    // `start` on. -1 where none takes it.
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

    // Before the first choice of several.
    virtual void before_choices(const RouterState& state) { static_cast<void>(state); }
    virtual std::int32_t choose(const RouterState& state, const Request& request) = 0;
    virtual void after_bind(RouterState& state, std::int32_t worker) {
        static_cast<void>(state);
        static_cast<void>(worker);
    }

 private:
    bool holds_when_full_;
};

}  // namespace equipoise::requests
