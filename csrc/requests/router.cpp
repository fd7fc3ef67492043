#include "requests/router.h"

#include <cmath>

namespace equipoise::requests {
namespace {

void require(bool holds, const char* what) {
    if (!holds) throw RouterError(what);
}

bool sound(double value) { return value >= 0 && std::isfinite(value); }

void check(const PolicySettings& settings, std::size_t workers) {
    // Checked before anything is allocated, because memory is in proportion. The bound is that of a
    // simulation.
    require(workers >= 1 && workers <= 65536, "workers: expected 1 to 65536");
    require(settings.when_full == "queue" || settings.when_full == "hold",
            "when_full: expected queue or hold");
    require(settings.predictor == "survival" || settings.predictor == "oracle",
            "predictor: expected survival or oracle");
    require(settings.front_ends >= 1, "front_ends: expected at least 1");
    require(settings.front_end >= 0 && settings.front_end < settings.front_ends,
            "front_end: expected one of the front ends");
    require(settings.greedy_slots >= 0, "greedy_slots: expected at least 0");
    require(settings.subset >= 1 && settings.subset <= 16, "subset: expected 1 to 16");
    require(settings.candidates >= 1, "candidates: expected at least 1");
    require(settings.horizon >= 0 && settings.horizon <= 65536, "horizon: expected 0 to 65536");
    require(settings.gamma > 0 && settings.gamma <= 1, "gamma: expected above 0, at most 1");
    require(settings.points >= 2 && settings.points <= 1024, "points: expected 2 to 1024");
    require(std::isfinite(settings.alpha), "alpha: expected a finite number");
    require(sound(settings.beta), "beta: expected at least 0");
    require(settings.window >= 1, "window: expected at least 1");
    require(sound(settings.wait_bonus), "wait_bonus: expected at least 0");
    require(sound(settings.slack), "slack: expected at least 0");
    require(sound(settings.overshoot), "overshoot: expected at least 0");
    require(sound(settings.prompt_weight.value_or(0)), "prompt_weight: expected at least 0");
    require(sound(settings.prefill_wait), "prefill_wait: expected at least 0");
}

}  // namespace

std::unique_ptr<Policy> make_policy(const PolicySettings& settings, std::size_t workers) {
    check(settings, workers);
    std::unique_ptr<Policy> policy = make_counting_policy(settings, workers);
    if (!policy) policy = make_prefix_aware_policy(settings, workers);
    if (!policy) policy = make_balance_route(settings);
    if (!policy) policy = make_fast_phi(settings);
    if (!policy) policy = make_water_level_fit(settings);
    if (!policy) throw RouterError("no policy is called " + settings.name);
    return policy;
}

// Requests that may go to one worker only go before those that may go to any, which have a choice.
void Router::bind_pinned() {
    for (std::int32_t r = state_.first_pinned(); r >= 0;) {
        const std::int32_t next = state_.after(r);
        const std::int32_t w = state_.request(r).pinned;
        const Worker& worker = state_.worker(w);
        if (policy_->queues() ? worker.serves() : state_.fits(worker, state_.request(r)))
            state_.bind(r, w);
        r = next;
    }
}

const std::vector<Binding>& Router::dispatch() {
    state_.end_step();
    return decide();
}

const std::vector<Binding>& Router::decide() {
    state_.bindings().clear();
    if (state_.pinned() > 0) bind_pinned();
    if (state_.pooled() > 0) policy_->dispatch(state_);
    return state_.bindings();
}

const std::vector<Binding>& Router::dispatch_between_steps(bool arrival) {
    state_.settle_step();
    if (!waits_ || !state_.mid_step() || (arrival && state_.free_slots() >= state_.pooled()))
        return decide();
    state_.bindings().clear();
    return state_.bindings();
}

}  // namespace equipoise::requests
