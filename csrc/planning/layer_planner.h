// What one thread plans, layer by layer.
#pragma once

#include <vector>

#include "planning/even_split.h"
#include "planning/plan_layers.h"
#include "planning/share_rounding.h"

namespace equipoise {

// Writes one layer's row of the answer a call.
class Worker {
 public:
    Worker(const Request& request, const Answer& answer);

    // Whatever is installed.
    void plan_anew(std::int64_t layer);

    // What is installed stays, unless the layer misses the target by more than as much again, or a
    // risk can be lowered by more than the target: then it is improved at once. Whether it stayed.
    bool keep(std::int64_t layer);

    // Within the layer's allowance.
    void improve(std::int64_t layer);

 private:
    // What changes came to: the height of the fullest rank, and the copies that may still move.
    struct Attempt {
        std::int64_t height, left;
    };

    Ids installed(std::int64_t layer) const;
    bool alike() const;
    void propose(std::int64_t layer);
    void reset(std::int64_t layer, Ids placement);
    std::int64_t change(std::int64_t layer);
    bool calm(std::int64_t layer, std::int64_t gain, std::int64_t copies);
    Attempt try_to_lower(std::int64_t copies);
    void note(std::vector<std::int32_t>& placement) const;
    void settle_on(const std::vector<std::int32_t>& placement);
    std::int64_t settle();
    void return_to_slots(Ids installed);
    std::int64_t goal() const;
    std::int64_t far() const;
    bool far_off();
    bool level() const { return request_.aims.split == Split::kLevel; }
    void write(std::int64_t layer);
    std::int64_t moves(std::int64_t layer) const;

    const Request& request_;
    const Answer& answer_;
    Board board_;
    Leveller leveller_;
    Improver improver_;
    Evener evener_;
    Risk risk_;
    Rounding rounding_;
    std::vector<std::int32_t> fresh_, before_, other_;
};

}  // namespace equipoise
