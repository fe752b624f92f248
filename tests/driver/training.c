/* A training, as far as the driver can tell: contexts, device files, forked workers, and one of many ways to end.

   training [-r] [-g UUID] [-n] [-x] [-s] [-b MIB] [-w WORKERS] [-e EPOCH_S] [-o ORPHAN_S] [-h HOLD_S]
     -r  one rank for each GPU of the mask, each with a context on its own; else one process with a context on each
     -g  a context on this GPU only, wherever CUDA shows it; without a mask all are opened all the same
     -n  as NCCL does: a handle of every GPU from NVML, and what its peers are, never given back
     -x  only that: no CUDA at all, an exporter of metrics
     -s  stay when SIGTERM comes
     -b  memory to allocate on each GPU beside the context
     -w  fork this many workers, again in every epoch; they inherit open files, and outlive a parent that is killed
     -o  leave a worker of this life behind when ending
     -h  end by itself after so long; else when it is told to

   It prints `ready PID` when its contexts are there, for each rank, and `failed CODE` with the code of CUDA. */
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static int ranks, nccl, exporter, stubborn, workers;
static double epoch_s = 1, orphan_s, hold_s = 1e9;
static size_t allocated;
static const char *wanted;
static volatile sig_atomic_t ended;

static void end(int signal) { ended = 1; }
static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec / 1e9;
}
static void *symbol(const char *library, const char *name) {
    void *loaded = dlopen(library, RTLD_NOW), *found = loaded ? dlsym(loaded, name) : NULL;
    if (!found) { printf("failed %s\n", dlerror()); exit(3); }
    return found;
}
#define CALL(library, name, ...) ((int (*)())symbol(library, name))(__VA_ARGS__)
#define CUDA(name, ...) CALL("libcuda.so.1", name, __VA_ARGS__)
#define NVML(name, ...) CALL("libnvidia-ml.so.1", name, __VA_ARGS__)

static void check(int code) { if (code) { printf("failed %d\n", code); exit(2); } }

static void open_all(void) {
    void *handles[64];
    unsigned count = 0, status;
    if (NVML("nvmlInit_v2") || NVML("nvmlDeviceGetCount_v2", &count)) exit(2);
    for (unsigned i = 0; i < count; i++)
        if (NVML("nvmlDeviceGetHandleByIndex_v2", i, &handles[i])) handles[i] = NULL;
    for (unsigned i = 0; i < count; i++)
        for (unsigned j = 0; j < count; j++)
            if (handles[i] && handles[j]) NVML("nvmlDeviceGetP2PStatus", handles[i], handles[j], 0, &status);
}
static void use(int device) {
    void *context;
    uint64_t address;
    check(CUDA("cuDevicePrimaryCtxRetain", &context, device));
    check(CUDA("cuCtxSetCurrent", context));
    if (allocated) check(CUDA("cuMemAlloc_v2", &address, allocated));
}
static int shown(void) {
    int count;
    check(CUDA("cuInit", 0));
    check(CUDA("cuDeviceGetCount", &count));
    return count;
}
static int is_wanted(int device) {
    unsigned char bytes[16];
    char text[64] = "GPU-", *at = text + 4;
    check(CUDA("cuDeviceGetUuid", bytes, device));
    for (int i = 0; i < 16; i++) at += sprintf(at, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", bytes[i]);
    return !strcmp(text, wanted);
}
static void worker(double life_s) {
    if (fork()) return;
    signal(SIGTERM, SIG_IGN);
    for (double end_s = now_s() + life_s; now_s() < end_s;) usleep(10000);
    _exit(0);
}
static void train(void) {
    double begun_s = now_s(), next_s = begun_s;
    while (!ended && now_s() < begun_s + hold_s) {
        for (int i = 0; workers && now_s() >= next_s && i < workers; i++) worker(epoch_s * 0.8);
        if (now_s() >= next_s) next_s += epoch_s;
        while (waitpid(-1, NULL, WNOHANG) > 0) {}
        usleep(10000);
    }
    if (orphan_s > 0) worker(orphan_s);
    _exit(0);
}
static void one(int device) {
    int count = exporter ? 0 : shown();
    for (int i = 0; i < count; i++)
        if (wanted ? is_wanted(i) : device < 0 || device == i) use(i);
    if (nccl || exporter) open_all();
    printf("ready %d\n", getpid());
    fflush(stdout);
    train();
}
/* The number of GPUs in the mask: the launcher of the ranks opens none of them itself. */
static int masked(void) {
    const char *mask = getenv("CUDA_VISIBLE_DEVICES");
    int count = mask && *mask;
    for (; mask && *mask; mask++) count += *mask == ',';
    return count;
}

int main(int count, char **words) {
    int option, wrong = 0, status;
    pid_t pids[64];
    while ((option = getopt(count, words, "rg:nxsb:w:e:o:h:")) != -1) switch (option) {
        case 'r': ranks = masked(); break;
        case 'g': wanted = optarg; break;
        case 'n': nccl = 1; break;
        case 'x': exporter = 1; break;
        case 's': stubborn = 1; break;
        case 'b': allocated = strtoull(optarg, NULL, 10) << 20; break;
        case 'w': workers = atoi(optarg); break;
        case 'e': epoch_s = atof(optarg); break;
        case 'o': orphan_s = atof(optarg); break;
        case 'h': hold_s = atof(optarg); break;
        default: return 64;
    }
    sigaction(SIGTERM, &(struct sigaction){.sa_handler = stubborn ? SIG_IGN : end}, NULL);  /* it interrupts `wait` */
    if (!ranks) one(-1);
    for (int rank = 0; rank < ranks; rank++)
        if (!(pids[rank] = fork())) one(rank);
    for (pid_t pid; (pid = wait(&status)) > 0 || errno == EINTR;) {
        if (pid > 0) wrong |= status;
        else for (int rank = 0; rank < ranks; rank++) kill(pids[rank], SIGTERM);  /* as torchrun does */
    }
    return wrong != 0;
}
