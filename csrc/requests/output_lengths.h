// How long outputs are, as observed so far: what is likely to happen to a request of some age.
#pragma once

#include <cstdint>
#include <vector>

namespace equipoise::requests {

class OutputLengths {
 public:
    void add(std::int64_t length);
    std::int64_t count() const { return count_; }

    // P(output > age + ahead | output > age); 0 where nobody has come that far.
    double survival(std::int64_t age, std::int64_t ahead) const;
    // E[min(output - age, horizon) | output > age]: 1 where nobody has come that far, since the
    // token that ends a request is still to come.
    double remaining(std::int64_t age, std::int64_t horizon) const;
    // The smallest length that at least `share` of the outputs do not exceed.
    std::int64_t quantile(double share) const;

 private:
    // Sums are brought up to date every so many additions: a request more changes little.
    static constexpr std::int64_t kEvery = 32;
    static constexpr std::int64_t kLongest = std::int64_t{1} << 20;

    void refresh();
    std::int64_t above(std::int64_t length) const;  // how many outputs are longer

    std::int64_t count_ = 0, fresh_ = 0;
    std::vector<std::int64_t> histogram_;
    std::vector<std::int64_t> above_;  // [length], outputs longer than it
    std::vector<std::int64_t> area_;   // [length], sum of above_ before it
};

}  // namespace equipoise::requests
