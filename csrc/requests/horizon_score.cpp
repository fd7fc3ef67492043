#include "requests/horizon_score.h"

#include <algorithm>
#include <cmath>

namespace equipoise::requests {

HorizonScore::HorizonScore(const PolicySettings& settings, const OutputLengths& lengths)
    : steps_(static_cast<std::size_t>(settings.horizon)),
      alpha_(settings.alpha),
      beta_(settings.beta),
      oracle_(settings.predictor == "oracle"),
      lengths_(lengths) {
    double weight = 1;
    for (std::size_t h = 0; h <= steps_; ++h, weight *= settings.gamma) {
        weights_.push_back(weight);
        total_ += weight;
    }
}

// Returns the steps until a request is expected to end, cut off at the horizon. As long as no
// request has ended, all are expected to outlive it.
double HorizonScore::ends_in(const RouterState& state, const Request& request) const {
    const std::int64_t age = state.age(request);
    const auto horizon = static_cast<std::int64_t>(steps_);
    if (oracle_ && request.expected >= 0)
        return static_cast<double>(std::min(request.expected - age, horizon));
    if (lengths_.count() == 0) return static_cast<double>(horizon);
    return lengths_.remaining(age, horizon);
}

void HorizonScore::project(const RouterState& state) {
    loads_.assign(state.size() * (steps_ + 1), 0.0);
    envelope_.assign(steps_ + 1, 0.0);
    weight_ = beta_ > 0 ? beta_ : static_cast<double>(state.count_present());
    for (std::size_t w = 0; w < state.size(); ++w) project(state, w);
}

void HorizonScore::project(const RouterState& state, std::size_t w) {
    ended_weight_.assign(steps_ + 2, 0.0);
    double weight = static_cast<double>(state.worker(w).others_load);
    const auto assumed_front_ends = static_cast<double>(state.worker(w).assumed_front_ends);
    for (const std::int32_t r : state.worker(w).members) {
        const Request& request = state.request(r);
        const double left = ends_in(state, request);
        // At least one: every request runs in the coming step.
        const auto end = static_cast<std::size_t>(std::max(1.0, std::ceil(left)));
        const double tokens = assumed_front_ends * static_cast<double>(state.weight(request));
        weight += tokens;
        if (left >= static_cast<double>(steps_)) continue;  // ends after the horizon
        ended_weight_[end] += tokens;
    }
    // One pass over the steps instead of one per request.
    double* out = loads(w);
    for (std::size_t h = 0; h <= steps_; ++h) {
        weight -= ended_weight_[h];
        out[h] = weight;
        envelope_[h] = std::max(envelope_[h], out[h]);
    }
}

void HorizonScore::add(std::size_t worker, std::int64_t size) {
    double* out = loads(worker);
    for (std::size_t h = 0; h <= steps_; ++h) {
        out[h] += static_cast<double>(size);
        envelope_[h] = std::max(envelope_[h], out[h]);
    }
}

void HorizonScore::select_worker(std::size_t worker) {
    const double* own = loads(worker);
    margins_.clear();
    for (std::size_t h = 0; h <= steps_; ++h)
        margins_.emplace_back(envelope_[h] - own[h], weights_[h]);
    // Sorted, so that the steps in which a request overflows are a prefix.
    std::sort(margins_.begin(), margins_.end());
    weight_sums_.assign(1, 0.0);
    margin_sums_.assign(1, 0.0);
    for (const auto& [margin, weight] : margins_) {
        weight_sums_.push_back(weight_sums_.back() + weight);
        margin_sums_.push_back(margin_sums_.back() + weight * margin);
    }
}

double HorizonScore::score(std::int64_t size) const {
    const auto added = static_cast<double>(size);
    const auto below = std::partition_point(margins_.begin(), margins_.end(),
                                            [added](const auto& m) { return m.first < added; });
    const auto n = static_cast<std::size_t>(below - margins_.begin());
    const double overflow = added * weight_sums_[n] - margin_sums_[n];
    return alpha_ * total_ * added - weight_ * overflow;
}

}  // namespace equipoise::requests
