#include "routing/deal_rows.h"

#include <algorithm>

#include "common/random.h"

namespace equipoise {

void deal_rows(Ids counts, std::int32_t ranks, std::uint64_t seed, Span<std::int32_t> dealt) {
    std::fill(dealt.begin(), dealt.end(), 0);
    CounterRng random(seed);
    std::uint64_t bits = 0;
    int draws_left = 0;
    for (std::size_t expert = 0; expert < counts.size; ++expert)
        for (std::int32_t row = 0; row < counts[expert]; ++row) {
            // A word is four draws: to draw is most of the work.
            if (draws_left == 0) {
                bits = random.next();
                draws_left = 4;
            }
            const auto draw = static_cast<std::uint32_t>(bits & 0xFFFF);
            const std::size_t rank = (draw * static_cast<std::uint32_t>(ranks)) >> 16;
            ++dealt[rank * counts.size + expert];
            bits >>= 16;
            --draws_left;
        }
}

}  // namespace equipoise
