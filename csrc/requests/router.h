// The router of one front end: what it knows (RouterState) and the policy that decides.
#pragma once

#include <memory>

#include "requests/policy.h"

namespace equipoise::requests {

class Router {
 public:
    // The policy first: the state has to know whether it binds to full workers.
    Router(const PolicySettings& settings, std::size_t workers, std::int64_t slots,
           std::int64_t room)
        : policy_(make_policy(settings, workers)),
          waits_(settings.lockstep && !policy_->queues()),
          state_(workers, slots, room, settings.front_ends, !policy_->queues()) {
        state_.set_step_end(settings.lockstep ? StepEnd::all_told : StepEnd::tokens);
        // Without a barrier there is no step whose time could be known.
        if (settings.lockstep && settings.name == "fit" && !settings.prompt_weight)
            state_.time_steps();
    }

    RouterState& state() { return state_; }
    const RouterState& state() const { return state_; }

    // The request ended by itself; the policy learns how long its output was.
    void finish(std::int32_t request) {
        state_.count_end(request);
        policy_->finished(state_.leave(request));
    }

    // Ends the step, decides, and returns what is to be sent now. Valid until the next call.
    const std::vector<Binding>& dispatch();
    // The same, but nothing is decided in the middle of a step. An arrival need not wait for
    // that while there are slots for all that wait: there is nothing to choose. A policy that binds
    // to full workers never waits, nor one of workers without a barrier.
    const std::vector<Binding>& dispatch_between_steps(bool arrival);
    // Whether something waits that may be bound when the step is over.
    bool due() const {
        return waits_ && state_.mid_step() && state_.pooled() + state_.pinned() > 0 &&
               state_.free_slots() > 0;
    }

 private:
    const std::vector<Binding>& decide();
    void bind_pinned();

    std::unique_ptr<Policy> policy_;
    bool waits_;  // for the rest of a step
    RouterState state_;
};

}  // namespace equipoise::requests
