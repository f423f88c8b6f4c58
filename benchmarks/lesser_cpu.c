// Loaded into a program before its libraries (LD_PRELOAD), it makes the CPUID instruction fault and answers it without some
// features. MASK_EBX, MASK_ECX, MASK_EDX hide bits of leaf 7; MASK_1_EAX hides bits of its part 1; all are set in hexadecimal.
// If the machine cannot let CPUID fault, the program ends; so does one that uses CPUID while its thread blocks SIGSEGV, or that
// sets a handler of SIGSEGV by another way than sigaction and signal. See benchmarks/lesser_cpu.py.
#define _GNU_SOURCE
#include <asm/prctl.h>
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

typedef void (*Handler)(int);
static int (*true_sigaction)(int, const struct sigaction *, struct sigaction *);
static Handler (*true_signal)(int, Handler);
static struct sigaction others;  // what the program wants for its own faults
static unsigned ebx, ecx, edx, eax_1;

static void find_true(void) {
    if (true_signal) return;
    true_sigaction = (int (*)(int, const struct sigaction *, struct sigaction *))dlsym(RTLD_NEXT, "sigaction");
    true_signal = (Handler(*)(int, Handler))dlsym(RTLD_NEXT, "signal");
}

static int let_cpuid_run(int run) { return (int)syscall(SYS_arch_prctl, ARCH_SET_CPUID, run); }

static void handle(int number, siginfo_t *info, void *context) {
    greg_t *at = ((ucontext_t *)context)->uc_mcontext.gregs;
    const unsigned char *code = (const unsigned char *)at[REG_RIP];
    if (info->si_code != SI_KERNEL || code[0] != 0x0f || code[1] != 0xa2) {  // not CPUID
        const struct sigaction wanted = others;
        if (wanted.sa_flags & SA_RESETHAND) others = (struct sigaction){.sa_handler = SIG_DFL};
        if (wanted.sa_flags & SA_SIGINFO)
            wanted.sa_sigaction(number, info, context);
        else if (wanted.sa_handler != SIG_DFL && wanted.sa_handler != SIG_IGN)
            wanted.sa_handler(number);
        else {
            true_signal(number, SIG_DFL);
            raise(number);  // it comes when this handler has returned
        }
        return;
    }
    const unsigned leaf = (unsigned)at[REG_RAX], part = (unsigned)at[REG_RCX];
    unsigned a = leaf, b, c = part, d;
    let_cpuid_run(1);
    __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    let_cpuid_run(0);
    if (leaf == 7 && part == 0) b &= ~ebx, c &= ~ecx, d &= ~edx;
    if (leaf == 7 && part == 1) a &= ~eax_1;
    at[REG_RAX] = a, at[REG_RBX] = b, at[REG_RCX] = c, at[REG_RDX] = d;
    at[REG_RIP] += 2;
}

int sigaction(int number, const struct sigaction *wanted, struct sigaction *old) {
    find_true();
    if (number != SIGSEGV) return true_sigaction(number, wanted, old);
    const struct sigaction before = others;
    if (wanted) others = *wanted;
    if (old) *old = before;
    return 0;
}

Handler signal(int number, Handler wanted) {
    find_true();
    if (number != SIGSEGV) return true_signal(number, wanted);
    const Handler before = others.sa_handler;
    others = (struct sigaction){.sa_handler = wanted};
    return before;
}

static unsigned bits(const char *name) {
    const char *text = getenv(name);
    return text ? (unsigned)strtoul(text, NULL, 16) : 0;
}

__attribute__((constructor)) static void begin(void) {
    find_true();
    ebx = bits("MASK_EBX"), ecx = bits("MASK_ECX"), edx = bits("MASK_EDX"), eax_1 = bits("MASK_1_EAX");
    const struct sigaction ours = {.sa_sigaction = handle, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    if (true_sigaction(SIGSEGV, &ours, NULL) || let_cpuid_run(0)) {
        perror("CPUID cannot be made to fault here");
        _exit(70);
    }
}
