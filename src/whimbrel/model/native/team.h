// Threads that help the only lane which is busy. A lone small batch then runs on several cores.
//
// A lane that leads opens the team, and helpers spin until it closes. Work is shared in parts whose results do not
// depend on the member that computes them. Each member begins with a part of its own, the same fraction of every job:
// the numbers that it wrote in the last job are in its cache. A member that is done takes from the others. Another lane
// that starts closes the team: the leader goes on alone.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>

#include "simd.h"

namespace whimbrel {

constexpr i64 SHARES = 4;              // in which a part is taken
constexpr i64 MOST_PARTS = 64;         // more members begin with the part of another
constexpr unsigned YIELD_ROUNDS = 64;  // some microseconds

// The part with which a member begins.
struct alignas(64) Part {
    std::atomic<i64> next{0};
    i64 end = 0;
};

// Numbers that one thread writes while others read are on cache lines of their own.
struct Team {
    alignas(64) std::atomic<i32> open{0};
    alignas(64) std::atomic<u32> job{0};     // odd while there is one
    alignas(64) std::atomic<i32> inside{0};  // helpers that may be at work
    alignas(64) std::atomic<bool> failed{false};
    std::atomic<i64> members{1};
    i64 num_parts = 1, share = 1;
    void (*run)(void*, i64, i64) = nullptr;
    void* context = nullptr;
    Part parts[MOST_PARTS];

    void divide(i64 count) {
        num_parts = std::min(members.load(), MOST_PARTS);
        share = std::max<i64>(1, count / (SHARES * num_parts));
        for (i64 i = 0; i < num_parts; i++)
            parts[i].next = i * count / num_parts, parts[i].end = (i + 1) * count / num_parts;
    }
    void work(i64 member) {
        try {
            for (i64 i = 0; i < num_parts; i++) {
                Part& part = parts[(member + i) % num_parts];
                for (i64 first = part.next.fetch_add(share); first < part.end; first = part.next.fetch_add(share))
                    run(context, first, std::min(part.end, first + share));
            }
        } catch (const std::bad_alloc&) {
            failed = true;
        }
    }
};

// Waiting for another thread. It may be due on the same core, so this one gives way now and then.
class Spin {
  public:
    void wait() {
        Pause();
        if (++rounds_ % YIELD_ROUNDS == 0) sched_yield();
    }

  private:
    unsigned rounds_ = 0;
};

inline Team team;
inline std::atomic<bool> led{false};
inline thread_local bool leads = false;

// Run f(first, last) for parts of the numbers below `count`, with the team if this thread leads it. Throws
// std::bad_alloc.
template <class F>
void in_parallel(i64 count, F& f) {
    if (!leads || count < 2 || !team.open.load()) return f(0, count);
    team.divide(count);
    team.context = &f, team.failed = false;
    team.run = [](void* context, i64 first, i64 last) { (*static_cast<F*>(context))(first, last); };
    team.job.fetch_add(1);
    team.work(0);
    team.job.fetch_add(1);  // a helper that comes now finds none
    for (Spin spin; team.inside.load();) spin.wait();
    if (team.failed) throw std::bad_alloc();
}

// Become the leader and wake the helpers. False if another thread leads.
inline bool open_team() {
    bool none = false;
    if (!led.compare_exchange_strong(none, true)) return false;
    leads = true;
    team.open = 1;
    syscall(SYS_futex, reinterpret_cast<i32*>(&team.open), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
    return true;
}

inline void leave_team() {
    team.open = 0;
    leads = false;
    led = false;
}

// Help until the process ends.
inline void help_team() {
    const i64 member = team.members.fetch_add(1);
    for (;;) {
        while (!team.open.load())
            syscall(SYS_futex, reinterpret_cast<i32*>(&team.open), FUTEX_WAIT_PRIVATE, 0, nullptr, nullptr, 0);
        for (Spin spin; team.open.load();) {
            const u32 job = team.job.load();
            if (job % 2 == 0) {
                spin.wait();
                continue;
            }
            team.inside.fetch_add(1);
            if (team.job.load() == job) team.work(member);
            team.inside.fetch_sub(1);
        }
    }
}

}  // namespace whimbrel
