// Messages between pairs of ranks: one send, one receive, or a batch.
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "collective.h"
#include "operation.h"

namespace npusim::hccl {

// One end of a message; `what.root` is the other end.
struct Message {
  Descriptor what;
  Block block;
};

// A copy inside the rank.
struct OwnCopy {
  Block from;
  Block to;
};

// Sends one after the other and receives one after the other, both ways at a time. In a batch they
// stand in the order in which HCCL pairs ranks up, which makes a batch free of circular waits.
struct ExchangePlan {
  std::string name;
  std::vector<OwnCopy> own;
  std::vector<Message> sends;
  std::vector<Message> receives;
};

// A message is a rendezvous: its bytes flow when both ends have come, and a send ends when the
// receiver has taken them all (stricter than documented: ASSUMED).
class Exchange : public Operation {
 public:
  Exchange(Shared communicator, ExchangePlan plan);

 protected:
  uint64_t bytes_out() const override;
  uint64_t bytes_in() const override;
  Lanes lanes() const override;
  void announce() override;
  bool met() override { return true; }  // each message waits for its own other end
  Step move() override;
  std::vector<int> missing() const override;
  std::string what() const override;

 private:
  // The message at the head of one way.
  struct Head {
    size_t index = 0;
    uint64_t number = 0;  // among the messages of its lane, counted from 1; 0: not announced
    bool met = false;
    uint64_t done = 0;    // bytes
  };

  bool send();
  bool receive();
  void offer(const Message& message);
  void want(const Message& message);
  bool meet(const Message& message, Head& head, const std::atomic<uint64_t>& said,
            const Descriptor* theirs);
  void compare(const Message& mine, const Descriptor& theirs) const;

  const ExchangePlan plan_;
  Head sending_;
  Head receiving_;
};

}  // namespace npusim::hccl
