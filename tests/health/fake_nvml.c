/* A driver for tests. FT_FAKE_NVML names a file with one line a GPU: `UUID used-bytes error-code hang pid:bytes ...`, read anew at every call. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct { unsigned pid; unsigned long long used; unsigned gi, ci; } process_t;
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { char uuid[96]; unsigned long long used; int error, hang, count; process_t users[16]; } gpu_t;

static gpu_t gpus[16];

static int load(void) {
    FILE *file = fopen(getenv("FT_FAKE_NVML"), "r");
    char line[1024];
    int n = 0;
    if (!file) return -1;
    while (n < 16 && fgets(line, sizeof line, file)) {
        gpu_t *g = &gpus[n];
        char *save, *word = strtok_r(line, " \n", &save);
        if (!word) continue;
        memset(g, 0, sizeof *g);
        snprintf(g->uuid, sizeof g->uuid, "%s", word);
        g->used = strtoull(strtok_r(NULL, " \n", &save), NULL, 10);
        g->error = atoi(strtok_r(NULL, " \n", &save));
        g->hang = atoi(strtok_r(NULL, " \n", &save));
        while ((word = strtok_r(NULL, " \n", &save))) {
            g->users[g->count].pid = (unsigned)atoi(word);
            g->users[g->count++].used = strtoull(strchr(word, ':') + 1, NULL, 10);
        }
        n++;
    }
    fclose(file);
    return n;
}

int nvmlInit_v2(void) { return load() < 0 ? 9 : 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return code == 15 ? "GPU is lost" : code == 3 ? "Not Supported" : "Unknown Error"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = (unsigned)load(); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = &gpus[index]; return (int)index < load() ? 0 : 2; }
int nvmlDeviceGetUUID(void *device, char *text, unsigned length) { snprintf(text, length, "%s", ((gpu_t *)device)->uuid); return 0; }

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    int n = load();
    for (int i = 0; i < n; i++)
        if (!strcmp(gpus[i].uuid, uuid)) { *device = &gpus[i]; return 0; }
    return 6;
}

int nvmlDeviceGetMemoryInfo(void *device, memory_t *memory) {
    gpu_t *g = device;
    while (g->hang) pause();
    memory->total = 80ULL << 30;
    memory->used = g->used;
    memory->free = memory->total - g->used;
    return g->error;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, process_t *found) {
    gpu_t *g = device;
    memcpy(found, g->users, sizeof(process_t) * (size_t)g->count);
    *count = (unsigned)g->count;
    return 0;
}
