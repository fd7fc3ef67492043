#include "requests/output_lengths.h"

#include <algorithm>

namespace equipoise::requests {

void OutputLengths::add(std::int64_t length) {
    const auto at = static_cast<std::size_t>(std::clamp<std::int64_t>(length, 0, kLongest));
    if (histogram_.size() <= at) histogram_.resize(at + 1, 0);
    ++histogram_[at];
    ++count_;
    if (count_ - fresh_ >= kEvery || count_ <= kEvery) refresh();
}

double OutputLengths::survival(std::int64_t age, std::int64_t ahead) const {
    const std::int64_t now = above(age);
    return now > 0 ? static_cast<double>(above(age + ahead)) / static_cast<double>(now) : 0.0;
}

double OutputLengths::remaining(std::int64_t age, std::int64_t horizon) const {
    const std::int64_t now = above(age);
    if (now == 0) return 1.0;
    // E[min(X, H)] of a whole number X is the sum of P(X > k) for k = 0 .. H - 1.
    const auto size = static_cast<std::int64_t>(area_.size()) - 1;
    const std::int64_t last = std::min(age + horizon, size);
    return static_cast<double>(area_[last] - area_[age]) / static_cast<double>(now);
}

std::int64_t OutputLengths::quantile(double share) const {
    const auto wanted = static_cast<double>(above_.empty() ? 0 : fresh_) * (1 - share);
    const auto found = std::partition_point(
        above_.begin(), above_.end(),
        [wanted](std::int64_t longer) { return static_cast<double>(longer) > wanted; });
    return found - above_.begin();
}

void OutputLengths::refresh() {
    fresh_ = count_;
    above_.assign(histogram_.size(), 0);
    area_.assign(histogram_.size() + 1, 0);
    std::int64_t longer = 0;
    for (std::size_t i = histogram_.size(); i-- > 0;) {
        above_[i] = longer;
        longer += histogram_[i];
    }
    for (std::size_t i = 0; i < above_.size(); ++i) area_[i + 1] = area_[i] + above_[i];
}

std::int64_t OutputLengths::above(std::int64_t length) const {
    return length < static_cast<std::int64_t>(above_.size()) ? above_[length] : 0;
}

}  // namespace equipoise::requests
