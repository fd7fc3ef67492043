// How long outputs have been so far, and how long a request of some age is likely to go on.
#pragma once

#include <cstdint>
#include <vector>

namespace equipoise::requests {

class OutputLengths {
 public:
    void add(std::int64_t length);
    std::int64_t count() const { return count_; }

    // P(output > age + ahead | output > age); 0 if no output was that long.
    double survival(std::int64_t age, std::int64_t ahead) const;
    // E[min(output - age, horizon) | output > age]; 1 if no output was that long, because the token
    // that ends a request is still to come.
    double remaining(std::int64_t age, std::int64_t horizon) const;
    // The smallest length that at least a part `share` of the outputs do not exceed.
    std::int64_t quantile(double share) const;

 private:
    // Sums are updated every so many additions, because that takes O(longest) and one request
    // changes little. Each of the first ones does: then one request changes much.
    static constexpr std::int64_t kEvery = 32;
    // Longer outputs count as this long: bounds the memory.
    static constexpr std::int64_t kLongest = std::int64_t{1} << 20;

    void refresh();
    std::int64_t above(std::int64_t length) const;

    std::int64_t count_ = 0, fresh_ = 0;  // outputs; those in above_ and area_
    std::vector<std::int64_t> histogram_;
    std::vector<std::int64_t> above_;  // [length]: outputs that are longer
    std::vector<std::int64_t> area_;   // [length]: sum of above_ over shorter lengths
};

}  // namespace equipoise::requests
