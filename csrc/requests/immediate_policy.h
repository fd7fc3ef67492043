// A policy that binds every request as soon as it is its turn, to a worker that it chooses.
#pragma once

#include "requests/policy.h"

namespace equipoise::requests {

class Push : public Policy {
 public:
    explicit Push(const PolicySettings& settings) : holds_(settings.when_full == "hold") {}

    void dispatch(Fleet& fleet) final {
        begin(fleet);
        while (fleet.first() >= 0) {
            const std::int32_t request = fleet.first();
            const std::int32_t worker = choose(fleet, fleet.request(request));
            if (worker < 0) return;
            fleet.bind(request, worker);
            picked(fleet, worker);
        }
    }

    bool queues() const final { return !holds_; }

 protected:
    bool takes(const Worker& worker, const Fleet& fleet, const Request& request) const {
        return holds_ ? fleet.fits(worker, request) : worker.serves();
    }

    // Of those that take it the one with the least `score(worker)`; ties go to the first from
    // `start` on. -1 where none takes it.
    template <typename Score>
    std::int32_t least(const Fleet& fleet, const Request& request, std::size_t start,
                       Score score) const {
        std::int32_t best = -1;
        decltype(score(fleet.worker(0))) lowest{};
        for (std::size_t i = 0, w = start; i < fleet.size(); ++i, ++w) {
            if (w >= fleet.size()) w -= fleet.size();
            const Worker& worker = fleet.worker(w);
            if (!takes(worker, fleet, request)) continue;
            const auto value = score(worker);
            if (best >= 0 && !(value < lowest)) continue;
            best = static_cast<std::int32_t>(w);
            lowest = value;
        }
        return best;
    }

    // Before the first choice of several.
    virtual void begin(const Fleet& fleet) { static_cast<void>(fleet); }
    virtual std::int32_t choose(const Fleet& fleet, const Request& request) = 0;
    virtual void picked(Fleet& fleet, std::int32_t worker) {
        static_cast<void>(fleet);
        static_cast<void>(worker);
    }

 private:
    bool holds_;
};

}  // namespace equipoise::requests
