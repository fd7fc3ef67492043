// A fleet and the policy that decides for it: what a front end holds.
#pragma once

#include <memory>

#include "requests/policy.h"

namespace equipoise::requests {

class Router {
 public:
    Router(const PolicySettings& settings, std::size_t workers, std::int64_t slots,
           std::int64_t room)
        : policy_(make_policy(settings, workers)),
          state_(workers, slots, room, settings.front_ends, !policy_->queues()) {}

    RouterState& state() { return state_; }
    const RouterState& state() const { return state_; }

    void finish(std::int32_t request) { policy_->finished(state_.leave(request)); }

    // What is to be sent now; valid until the next call.
    const std::vector<Binding>& dispatch();

 private:
    void bind_pinned();

    std::unique_ptr<Policy> policy_;
    RouterState state_;
};

}  // namespace equipoise::requests
