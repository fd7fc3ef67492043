// An emulated link between network namespaces: packets wait here until they are due.
//
//     forwarder MEMBERS LATENCY RATE
//
// Makes a network namespace for each member, with one TUN device each (link0, 10.77.0.1 and on);
// what leaves a device goes to the one whose address it names. LATENCY: nanoseconds, one way. RATE:
// bytes per second that leave a member; a direction is serial, and does not share with others:
//
//     leaves  = max(now, the last one left) + bytes / RATE
//     arrives = leaves + LATENCY
//
// Nothing is ever dropped: how much is under way is bounded by the senders' TCP windows. Between two
// packets it sleeps and does not spin, as cores are few; a packet that is late for that delays none
// behind it, since instants are absolute.
//
// Prints a line for each member, the number of the descriptor that holds its namespace; ends when
// its standard input does, and takes everything along: neither a namespace nor a device has a name
// outside, so that the kernel removes them with the last process that is in them.

#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <string>
#include <utility>
#include <vector>

namespace {

using Nanos = std::int64_t;
using Bytes = std::vector<char>;

constexpr int kMtu = 65000;            // as a card takes what it cuts into segments itself
constexpr std::size_t kHeader = 10;    // of virtio, before a packet; says: no checksum
constexpr std::size_t kAddress = 16;   // place of the destination in an IPv4 header
constexpr std::size_t kLeast = 20;     // bytes of such a header
constexpr int kBatch = 16;             // packets that are taken from one device before others' turn
constexpr Nanos kSecond = 1'000'000'000;
const char* const kNetwork = "10.77.0.";

struct Packet {
    Nanos due;
    std::size_t target;
    Bytes bytes;
};

struct Member {
    int place = -1;  // its namespace
    int device = -1;
    Nanos left = 0;  // when the last packet had left
    std::deque<Packet> under_way = {};
};

struct Link {
    Nanos latency;
    double rate;
    std::vector<Member> members = {};
    std::vector<Bytes> spare = {};  // memory that packets were in
};

Nanos now() {
    timespec found{};
    clock_gettime(CLOCK_MONOTONIC, &found);
    return found.tv_sec * kSecond + found.tv_nsec;
}

[[noreturn]] void fail(const char* what) {
    std::fprintf(stderr, "%s: %s\n", what, std::strerror(errno));
    std::exit(1);
}

int checked(int outcome, const char* what) {
    if (outcome < 0) fail(what);
    return outcome;
}

// A knob of the namespace that this process is in; not every kernel has every one.
void turn(const char* knob, const char* value) {
    const int file = open((std::string("/proc/sys/net/ipv4/") + knob).c_str(), O_WRONLY | O_CLOEXEC);
    if (file < 0) return;
    if (write(file, value, std::strlen(value)) < 0) std::fprintf(stderr, "%s stays\n", knob);
    close(file);
}

void name(ifreq& request, const char* device) {
    std::memset(&request, 0, sizeof request);
    std::strncpy(request.ifr_name, device, IFNAMSIZ - 1);
}

void set_address(int control, const char* device, unsigned long what, const std::string& value) {
    ifreq request;
    name(request, device);
    auto* address = reinterpret_cast<sockaddr_in*>(&request.ifr_addr);
    address->sin_family = AF_INET;
    inet_pton(AF_INET, value.c_str(), &address->sin_addr);
    checked(ioctl(control, what, &request), "cannot set an address");
}

void bring_up(int control, const char* device) {
    ifreq request;
    name(request, device);
    checked(ioctl(control, SIOCGIFFLAGS, &request), "cannot read a device");
    request.ifr_flags |= IFF_UP;
    checked(ioctl(control, SIOCSIFFLAGS, &request), "cannot bring a device up");
}

int open_tun(const char* device) {
    const int file = checked(open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC), "/dev/net/tun");
    ifreq request;
    name(request, device);
    request.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR;
    checked(ioctl(file, TUNSETIFF, &request), "cannot make a TUN device");
    checked(ioctl(file, TUNSETOFFLOAD, TUN_F_CSUM), "cannot leave out checksums");
    return file;
}

Member make_member(int number) {
    checked(unshare(CLONE_NEWNET), "cannot make a network namespace");
    Member made;
    made.place = checked(open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC), "/proc/self/ns/net");
    made.device = open_tun("link0");
    const int control = checked(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0), "no socket");
    set_address(control, "link0", SIOCSIFADDR, kNetwork + std::to_string(number + 1));
    set_address(control, "link0", SIOCSIFNETMASK, "255.255.255.0");
    ifreq request;
    name(request, "link0");
    request.ifr_mtu = kMtu;
    checked(ioctl(control, SIOCSIFMTU, &request), "cannot set the size of packets");
    bring_up(control, "link0");
    bring_up(control, "lo");
    close(control);
    // Nothing is lost here, so this one never slows down: neither to measure a queue, as others do,
    // nor behind a loss. It is also the one that every namespace may choose.
    turn("tcp_congestion_control", "reno");
    turn("tcp_slow_start_after_idle", "0");
    // What is under way on a link that is fast and far has to fit several times.
    turn("tcp_wmem", "4096 4194304 33554432");
    turn("tcp_rmem", "4096 8388608 33554432");
    return made;
}

// The member that a packet is for; as many as there are: nobody.
std::size_t target_of(const Link& link, const char* packet, std::size_t bytes) {
    const std::size_t nobody = link.members.size();
    if (bytes < kLeast || (packet[0] >> 4 & 0xF) != 4) return nobody;
    char text[INET_ADDRSTRLEN];
    inet_ntop(AF_INET, packet + kAddress, text, sizeof text);
    if (std::strncmp(text, kNetwork, std::strlen(kNetwork)) != 0) return nobody;
    const int number = std::atoi(text + std::strlen(kNetwork));
    return number >= 1 ? std::min<std::size_t>(number - 1, nobody) : nobody;
}

Bytes memory(Link& link) {
    if (link.spare.empty()) return Bytes(kMtu + kHeader);
    Bytes found = std::move(link.spare.back());
    link.spare.pop_back();
    found.resize(kMtu + kHeader);
    return found;
}

// One packet from a member's device; false: there is none.
bool take(Link& link, Member& source) {
    Bytes bytes = memory(link);
    const ssize_t size = read(source.device, bytes.data(), bytes.size());
    const bool whole = size > static_cast<ssize_t>(kHeader);
    const std::size_t length = whole ? static_cast<std::size_t>(size) - kHeader : 0;
    const std::size_t target =
            whole ? target_of(link, bytes.data() + kHeader, length) : link.members.size();
    if (target < link.members.size()) {
        bytes.resize(static_cast<std::size_t>(size));
        const auto takes = static_cast<Nanos>(static_cast<double>(length) / link.rate * kSecond);
        source.left = std::max(source.left, now()) + takes;
        source.under_way.push_back({source.left + link.latency, target, std::move(bytes)});
    } else {
        link.spare.push_back(std::move(bytes));
    }
    return size > 0;
}

// Hands over what is due of one member's.
void release(Link& link, Member& source) {
    while (!source.under_way.empty() && source.under_way.front().due <= now()) {
        Packet& first = source.under_way.front();
        const int device = link.members[first.target].device;
        if (write(device, first.bytes.data(), first.bytes.size()) < 0) fail("a packet is lost");
        link.spare.push_back(std::move(first.bytes));
        source.under_way.pop_front();
    }
}

// Sleeps until something comes or is due; false when standard input has ended.
bool sleep_until_next(const Link& link, std::vector<pollfd>& watched) {
    Nanos next = -1;
    for (const Member& member : link.members) {
        if (member.under_way.empty()) continue;
        const Nanos due = member.under_way.front().due;
        next = next < 0 ? due : std::min(next, due);
    }
    const Nanos left = std::max<Nanos>(next - now(), 0);
    const timespec timeout{left / kSecond, left % kSecond};
    const int found = ppoll(watched.data(), watched.size(), next < 0 ? nullptr : &timeout, nullptr);
    if (found < 0 && errno != EINTR) fail("cannot wait");
    return found <= 0 || watched.back().revents == 0;
}

void forward(Link& link) {
    std::vector<pollfd> watched;
    for (const Member& member : link.members) watched.push_back({member.device, POLLIN, 0});
    watched.push_back({STDIN_FILENO, POLLIN, 0});
    while (sleep_until_next(link, watched)) {
        for (std::size_t number = 0; number < link.members.size(); ++number) {
            Member& member = link.members[number];
            if (watched[number].revents & POLLIN) {
                for (int taken = 0; taken < kBatch && take(link, member); ++taken) continue;
            }
            release(link, member);
        }
    }
}

}  // namespace

int main(int count, char** words) {
    if (count != 4) {
        std::fprintf(stderr, "usage: forwarder MEMBERS LATENCY RATE\n");
        return 2;
    }
    std::signal(SIGINT, SIG_IGN);  // whoever started this is interrupted too, and ends it in order
    prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
    Link link{std::atoll(words[2]), std::atof(words[3])};
    const int members = std::atoi(words[1]);
    for (int number = 0; number < members; ++number) {
        link.members.push_back(make_member(number));
        std::printf("%d\n", link.members.back().place);
    }
    std::fflush(stdout);
    forward(link);
    return 0;
}
