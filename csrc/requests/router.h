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
          state_(workers, slots, room, settings.front_ends, !policy_->queues()) {}

    RouterState& state() { return state_; }
    const RouterState& state() const { return state_; }

    // The request ended by itself; the policy learns how long its output was.
    void finish(std::int32_t request) { policy_->finished(state_.leave(request)); }

    // Decides, and returns what is to be sent now. Valid until the next call.
    const std::vector<Binding>& dispatch();

 private:
    void bind_pinned();

    std::unique_ptr<Policy> policy_;
    RouterState state_;
};

}  // namespace equipoise::requests
